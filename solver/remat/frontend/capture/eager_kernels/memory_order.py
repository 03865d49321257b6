"""The order of a tensor's elements in memory, in which eager mode's kernels on the CPU sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.frontend.capture.symbol_values import hint

Tensor = torch.Tensor


def memory_order(*tensors: Tensor) -> list[int]:
    """Return the dimensions, outermost first, in which a pointwise operation on all of these lays
    out its result. The order is the same for all values of symbolic sizes, which are 2 at least."""
    with _disable_current_modes():
        layouts = [([*map(hint, t.shape)], [*map(hint, t.stride())]) for t in tensors]
        operands = [torch.empty_strided(*layout, device="meta") for layout in layouts]
        strides = torch.empty_like(functools.reduce(torch.mul, operands)).stride()
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the dimensions; return the tensor unchanged if the order is the identity."""
    return x if list(order) == sorted(order) else x.permute(*order)


def inverse_permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Undo `permute` with the same order."""
    return permute(x, [order.index(i) for i in range(len(order))])
