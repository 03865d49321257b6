"""The order of a tensor's elements in memory, in which eager mode's kernels on the CPU sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from remat.frontend.capture.symbol_values import hint
from remat.frontend.common.torch_modes import capture_paused

Tensor = torch.Tensor


def memory_order(*tensors: Tensor) -> list[int]:
    """Return the dimensions, outermost first, in which a pointwise operation on all of these lays
    out its result. The order is the same for all values of symbolic sizes, which are 2 at least."""
    if any(t._has_symbolic_sizes_strides for t in tensors):
        with capture_paused():
            layouts = tuple((_hints(t.shape), _hints(t.stride())) for t in tensors)
    else:
        layouts = tuple((tuple(t.shape), t.stride()) for t in tensors)
    return list(_order_of_layouts(layouts))


def _hints(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(hint, sizes))


@functools.lru_cache(maxsize=1 << 12)
def _order_of_layouts(layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> list[int]:
    """Return the order for operands of these shapes and strides. A network has few of them."""
    with capture_paused():
        operands = [torch.empty_strided(*layout, device="meta") for layout in layouts]
        strides = torch.empty_like(functools.reduce(torch.mul, operands)).stride()
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the dimensions; return the tensor unchanged if the order is the identity."""
    return x if list(order) == sorted(order) else x.permute(*order)


def inverse_permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Undo `permute` with the same order."""
    return permute(x, [order.index(i) for i in range(len(order))])
