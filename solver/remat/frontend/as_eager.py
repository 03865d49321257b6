"""Captures of what eager mode runs, where torch's own capture takes something else.

torch traces a step under its Python dispatcher, which asks each operator for a kernel in Python
before it takes the one of eager mode. For the length of a capture some operators get one of ours
there. Nothing else sees them: eager mode does without that dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch._functorch.config
from torch._C import DispatchKey
from torch._ops import OpOverload

from remat.frontend.casts import Casts
from remat.frontend.dropout import bernoulli_, dropout

Kernels: TypeAlias = Mapping[tuple[OpOverload, DispatchKey], Callable[..., torch.Tensor]]

_CPU, _CUDA = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA


@contextmanager
def as_eager(casts: Casts) -> Iterator[None]:
    """Within it, what is captured is what eager mode runs: dropout, random numbers in place, and
    autocast, whose casts are kept in `casts`, and which is off in the backward."""
    aten = torch.ops.aten
    kernels: Kernels = {
        (aten.dropout.default, _CPU): dropout,
        (aten.bernoulli_.float, _CPU): bernoulli_,
        (aten.bernoulli_.float, _CUDA): bernoulli_,
        (aten._to_copy.default, _CPU): casts.cast,
        (aten._to_copy.default, _CUDA): casts.cast,
    }
    with (
        torch._functorch.config.patch(backward_pass_autocast="off"),
        casts.cleared_as_eager(),
        _installed(kernels),
    ):
        yield


@contextmanager
def _installed(kernels: Kernels) -> Iterator[None]:
    added = [(operator, key) for operator, key in kernels if key not in operator.py_kernels]
    for operator, key in added:
        operator.py_impl(key)(kernels[operator, key])
    try:
        yield
    finally:
        for operator, key in added:
            del operator.py_kernels[key]
            operator._dispatch_cache.clear()
