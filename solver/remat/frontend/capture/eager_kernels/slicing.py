"""Slices of a whole dimension in symbolic captures, as eager mode runs them.

`x[:, 0:]` shows all of `x`. If the size of `x` is a number, torch's indexing sees that and returns
an alias of `x`. If it is a SymInt, torch calls `aten.slice`, whose backward copies the gradient
into zeros.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_aten = torch.ops.aten


def eager_slice(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor:
    """Replace `aten.slice`: return `x` for a slice of a whole symbolic dimension."""
    size: Any = x.shape[dim]
    if isinstance(size, torch.SymInt) and _is_whole_dimension(size, start, end, step):
        return x
    with torch._C._DisablePythonDispatcher():
        return _aten.slice.Tensor(x, dim, start, end, step)


def _is_whole_dimension(size: torch.SymInt, start: Any, end: Any, step: Any) -> bool:
    if isinstance(start, torch.SymInt) or start not in (None, 0) or step != 1:
        return False
    if isinstance(end, torch.SymInt):
        return bool(end.node.expr == size.node.expr)
    return end is None or end == sys.maxsize
