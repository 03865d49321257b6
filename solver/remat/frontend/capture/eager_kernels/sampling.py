"""Random operators whose captured form differs from eager mode; see `overrides` in this folder.

Dropout and Bernoulli sampling are in `dropout`, recurrent networks in `recurrent`.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.memory_order import inverse_permute, memory_order

Tensor = torch.Tensor
Generator = torch.Generator

_aten = torch.ops.aten

_MIN_VECTORIZED_ELEMENTS = 16
"""The CPU's kernel for normally distributed numbers samples tensors of this many elements in
another order, if they are contiguous."""


def integers(
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
    return inverse_permute(sampled, order)


def integers_in_place(
    x: Tensor, low: int, high: int | None, *, generator: Generator | None = None
) -> Tensor:
    """Replace `aten.random_.from`; see `integers`."""
    return x.copy_(integers(x, low, high, generator=generator))


def normal_in_place(
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


def rrelu_with_noise(x: Tensor, noise: Tensor, *options: Any, **keywords: Any) -> Tensor:
    """Replace `aten.rrelu_with_noise` on the CPU, whose kernel returns a contiguous result for any
    input; that of the captured operator has the layout of its input."""
    with torch._C._DisablePythonDispatcher():
        return _aten.rrelu_with_noise.default(x.contiguous(), noise, *options, **keywords)


def rrelu_with_noise_out(
    x: Tensor, noise: Tensor, *options: Any, out: Tensor, **keywords: Any
) -> Tensor:
    """Replace `aten.rrelu_with_noise.out`, for which torch's functionalization returns `noise`."""
    return out.copy_(_aten.rrelu_with_noise.default(x, noise, *options, **keywords))
