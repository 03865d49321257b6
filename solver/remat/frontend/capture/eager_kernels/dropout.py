"""Dropout and Bernoulli sampling as eager mode runs them; see `overrides` in this folder.

For dropout, torch captures `aten.native_dropout`. That is what eager mode runs on CUDA. On the CPU,
eager mode multiplies by `noise = bernoulli(1 - p) / (1 - p)` in the dtype of its input: the scale
is rounded to that dtype, in forward and backward. (The kernels of `native_dropout` round it
differently, and for a gradient that is not dense they return other strides than a capture expects.)
Here dropout samples a boolean mask and multiplies by the rounded scale: the same bits, in a quarter
of the memory that eager mode needs for `noise` in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from remat.frontend.capture.eager_kernels.memory_order import (
    inverse_permute,
    memory_order,
    permute,
)
from remat.frontend.common.torch_modes import capture_paused

Tensor = torch.Tensor

_aten = torch.ops.aten


def cpu_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Replace `aten.dropout` on the CPU: store a boolean mask in place of float noise."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return _CpuDropout.apply(x, p)[0]  # type: ignore[index]


def bernoulli_in_place(
    x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """Replace `aten.bernoulli_`, which samples in the order of the elements in memory. Torch's
    capture samples a dense tensor instead, so that other elements get the random numbers."""
    if x.is_contiguous():
        with torch._C._DisablePythonDispatcher():
            return _aten.bernoulli_.float(x, p, generator=generator)
    return x.copy_(_sample_in_memory_order(x, p, x.dtype, generator))


class _CpuDropout(torch.autograd.Function):
    """Dropout that returns its output and its boolean mask, and saves the mask alone."""

    @staticmethod
    def forward(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        mask = _sample_in_memory_order(x, 1 - p, torch.bool)
        return _apply_mask(x, mask, _dropout_scale(p, x.dtype)), mask

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]
    ) -> None:
        x, p = inputs
        _, mask = output
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        ctx.scale = _dropout_scale(p, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return _apply_mask(gradients[0], mask, ctx.scale), None


def _sample_in_memory_order(
    like: Tensor, p: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Return a tensor of zeros, and of ones with probability `p`, with the shape of `like`, sampled
    in the order of the elements of `like` in memory."""
    order = memory_order(like)
    dense = torch.empty([like.shape[i] for i in order], dtype=dtype, device=like.device)
    return inverse_permute(_aten.bernoulli.p(dense, p, generator=generator), order)


@functools.cache
def _dropout_scale(p: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p) as the CPU's kernel computes and rounds it."""
    with capture_paused():
        return torch.ones((), dtype=dtype).div_(1 - p).item()


def _apply_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return `x * mask * scale` in one operation. A capture assumes that its result is dense, so
    the dimensions of its operands are permuted to the order in memory."""
    order = memory_order(x, mask)
    operands = permute(x, order), permute(mask, order)
    return inverse_permute(_aten.native_dropout_backward(*operands, scale), order)
