"""Random operators as eager mode runs them; see `overrides` in this folder.

For dropout, torch captures `aten.native_dropout`. That is what eager mode runs on CUDA. On the CPU,
eager mode multiplies by `noise = bernoulli(1 - p) / (1 - p)` in the dtype of its input: the scale
is rounded to that dtype, in forward and backward. (The kernels of `native_dropout` round it
differently, and for a gradient that is not dense they return other strides than a capture expects.)
Here dropout samples a boolean mask and multiplies by the rounded scale: the same bits, in a quarter
of the memory that eager mode needs for `noise` in float32.

Eager mode's kernels on the CPU sample in the order of the elements in memory (`memory_order`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from remat.errors import TraceError
from remat.frontend.capture.symbol_values import size_hint
from remat.frontend.common.torch_modes import capture_paused

Tensor = torch.Tensor

_aten = torch.ops.aten


def cpu_dropout_kernel(x: Tensor, p: float, train: bool) -> Tensor:
    """Replace `aten.dropout` on the CPU: save a boolean mask instead of float noise. Return `x`
    itself outside of training, and for p = 0."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return _CpuDropout.apply(x, p)[0]  # type: ignore[index]


def bernoulli_in_place_kernel(
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
        return _apply_dropout_mask(x, mask, _dropout_scale(p, x.dtype)), mask

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
        return _apply_dropout_mask(gradients[0], mask, ctx.scale), None


def _sample_in_memory_order(
    like: Tensor, p: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Return a tensor of zeros, and of ones with probability `p`, with the shape of `like`, sampled
    in the order of the elements of `like` in memory."""
    order = memory_order(like)
    dense = torch.empty([like.shape[i] for i in order], dtype=dtype, device=like.device)
    return undo_permute_dimensions(_aten.bernoulli.p(dense, p, generator=generator), order)


@functools.cache
def _dropout_scale(p: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p) as the CPU's kernel computes and rounds it."""
    with capture_paused():
        return torch.ones((), dtype=dtype).div_(1 - p).item()


def _apply_dropout_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return `x * mask * scale` in one operation. A capture assumes that its result is dense, so
    the dimensions of its operands are permuted to the order in memory."""
    order = memory_order(x, mask)
    operands = permute_dimensions(x, order), permute_dimensions(mask, order)
    return undo_permute_dimensions(_aten.native_dropout_backward(*operands, scale), order)


Generator = torch.Generator


_MIN_VECTORIZED_ELEMENTS = 16
"""The CPU's kernel for normally distributed numbers samples tensors of this many elements in
another order, if they are contiguous."""


def random_integers_kernel(
    x: Tensor, low: int, high: int | None, *, generator: Generator | None = None
) -> Tensor:
    """Replace `aten.random.from`: the name of this overload is a keyword of Python, so the code of
    torch's capture has a syntax error. `randint` samples the same numbers."""
    if high is None:
        raise TraceError(
            f"random_({low}, None) samples integers without an upper limit, which torch cannot "
            "capture; pass the upper limit: x.random_(low, high)"
        )
    order = memory_order(x)
    sizes = [x.shape[i] for i in order]
    sampled = _aten.randint.low_generator(
        low, high, sizes, generator=generator, dtype=x.dtype, device=x.device
    )
    return undo_permute_dimensions(sampled, order)


def random_integers_in_place_kernel(
    x: Tensor, low: int, high: int | None, *, generator: Generator | None = None
) -> Tensor:
    """Replace `aten.random_.from`; see `random_integers_kernel`."""
    return x.copy_(random_integers_kernel(x, low, high, generator=generator))


def normal_in_place_kernel(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """Replace `aten.normal_` on the CPU, to refuse a part of a tensor. The capture samples a copy
    of it, which is contiguous: the kernel then samples in another order than eager mode."""
    is_part = not x.is_contiguous() and memory_order(x) == list(range(x.dim()))
    if is_part and x.numel() >= _MIN_VECTORIZED_ELEMENTS:
        raise TraceError(
            "normal_ on a part of a tensor samples other numbers in a captured step than in eager "
            "mode; sample a whole tensor and copy it: part.copy_(torch.randn(part.shape))"
        )
    with torch._C._DisablePythonDispatcher():
        return _aten.normal_.default(x, mean, std, generator=generator)


def rrelu_with_noise_kernel(x: Tensor, noise: Tensor, *options: Any, **keywords: Any) -> Tensor:
    """Replace `aten.rrelu_with_noise` on the CPU, whose kernel returns a contiguous result for any
    input, by a call with a contiguous input: the captured operator keeps its input's layout."""
    with torch._C._DisablePythonDispatcher():
        return _aten.rrelu_with_noise.default(x.contiguous(), noise, *options, **keywords)


def rrelu_with_noise_out_kernel(
    x: Tensor, noise: Tensor, *options: Any, out: Tensor, **keywords: Any
) -> Tensor:
    """Replace `aten.rrelu_with_noise.out`, for which torch's functionalization returns `noise`."""
    return out.copy_(_aten.rrelu_with_noise.default(x, noise, *options, **keywords))


def memory_order(*tensors: Tensor) -> list[int]:
    """Return the dimensions in the order, outermost first, in which a pointwise operation on all of
    these tensors lays out its result. It is the same for all values of symbolic sizes, which are 2
    at least."""
    if any(t._has_symbolic_sizes_strides for t in tensors):
        with capture_paused():
            layouts = tuple((_size_hints(t.shape), _size_hints(t.stride())) for t in tensors)
    else:
        layouts = tuple((tuple(t.shape), t.stride()) for t in tensors)
    return list(_memory_order_of_layouts(layouts))


def _size_hints(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(size_hint, sizes))


@functools.lru_cache(maxsize=1 << 12)
def _memory_order_of_layouts(
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
) -> list[int]:
    """Return the order of `memory_order` for tensors of these shapes and strides. A network has few
    of them, so the results are cached."""
    with capture_paused():
        operands = [torch.empty_strided(*layout, device="meta") for layout in layouts]
        strides = torch.empty_like(functools.reduce(torch.mul, operands)).stride()
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def permute_dimensions(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return the tensor with its dimensions in this order; unchanged if the order is the
    identity."""
    return x if list(order) == sorted(order) else x.permute(*order)


def undo_permute_dimensions(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return the tensor whose dimensions `permute_dimensions` has put in this order."""
    return permute_dimensions(x, [order.index(i) for i in range(len(order))])
