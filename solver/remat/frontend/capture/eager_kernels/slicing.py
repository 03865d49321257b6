"""Slices of everything, as eager mode takes them.

`x[:, 0:]` is `x` under another name where the size of `x` is a number: torch's indexing looks, and
sees to the name. Where it is a symbol, torch slices, and the backward copies the gradient into
zeros.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_aten = torch.ops.aten


def sliced(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor:
    """`aten.slice`."""
    size: Any = x.shape[dim]
    if isinstance(size, torch.SymInt) and _is_whole(size, start, end, step):
        return x
    with torch._C._DisablePythonDispatcher():
        return _aten.slice.Tensor(x, dim, start, end, step)


def _is_whole(size: torch.SymInt, start: Any, end: Any, step: Any) -> bool:
    if isinstance(start, torch.SymInt) or start not in (None, 0) or step != 1:
        return False
    if isinstance(end, torch.SymInt):
        return bool(end.node.expr == size.node.expr)
    return end is None or end == sys.maxsize
