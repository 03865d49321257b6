"""Dropout and Bernoulli sampling as eager mode runs them; see `overrides` in this folder.

For dropout, torch captures `aten.native_dropout`. That is what eager mode runs on CUDA. On the CPU
it multiplies by `noise = bernoulli(1 - p) / (1 - p)` instead, in the type of its input: the scale
is rounded to that type, forward and backward. (The kernels of `native_dropout` round it another
way, and where a gradient is not dense they return it with other strides than a capture expects.)
Here a mask of truth values is drawn and the rounded scale applied to it: the same bits, in a
quarter of the memory that eager mode takes for `noise` in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.frontend.capture.symbolic_sizes import hint

Tensor = torch.Tensor

_aten = torch.ops.aten


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """`aten.dropout` on the CPU."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return _Dropout.apply(x, p)[0]  # type: ignore[index]


def bernoulli_(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """`aten.bernoulli_`. It draws in the order of the elements in memory; what a capture takes in
    its place returns a dense tensor, with the numbers in another order."""
    if x.is_contiguous():
        with torch._C._DisablePythonDispatcher():
            return _aten.bernoulli_.float(x, p, generator=generator)
    return x.copy_(_drawn(x, p, x.dtype, generator))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        mask = _drawn(x, 1 - p, torch.bool)
        return _scaled(x, mask, _scale(p, x.dtype)), mask

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]
    ) -> None:
        x, p = inputs
        _, mask = output
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        ctx.scale = _scale(p, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return _scaled(gradients[0], mask, ctx.scale), None


def _drawn(
    like: Tensor, p: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Ones with probability `p`, drawn in the order of the elements of `like` in memory."""
    order = _order(like)
    dense = torch.empty([like.shape[i] for i in order], dtype=dtype, device=like.device)
    return _restored(_aten.bernoulli.p(dense, p, generator=generator), order)


@functools.cache
def _scale(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p) as the CPU's kernel computes and rounds it."""
    with _disable_current_modes():
        return torch.ones((), dtype=dtype).div_(1 - p).item()


def _scaled(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`x * mask * scale` as one operation. A capture takes its result to be dense, so it gets its
    operands with their dimensions in the order in memory."""
    order = _order(x, mask)
    operands = _permuted(x, order), _permuted(mask, order)
    return _restored(_aten.native_dropout_backward(*operands, scale), order)


def _order(*tensors: Tensor) -> list[int]:
    """The dimensions in the order in which an operation on all of these, element by element, lays
    its result out in memory. It is the same whatever numbers symbols stand for, which are 2 at
    least."""
    with _disable_current_modes():
        layouts = [([*map(hint, t.shape)], [*map(hint, t.stride())]) for t in tensors]
        alike = [torch.empty_strided(*layout, device="meta") for layout in layouts]
        strides = torch.empty_like(functools.reduce(torch.mul, alike)).stride()
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def _permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    return x if list(order) == sorted(order) else x.permute(*order)


def _restored(x: Tensor, order: Sequence[int]) -> Tensor:
    return _permuted(x, [order.index(i) for i in range(len(order))])
