"""Kernels for captures of steps on CUDA: they call the operators that eager mode runs there.

They are registered in torch's Python dispatcher (see `overrides`). `CUDA_KERNELS` apply to tensors
on a GPU, where torch's capture takes other operators than eager mode. `absent_gpu_kernels` apply to
CPU tensors that stand for an absent GPU, and add what eager mode runs on CUDA only. Convolutions
have the memory layouts that cuDNN selects: those of the CPU's libraries depend on the batch size,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from remat.frontend.capture.eager_kernels.attention import attention_kernel
from remat.frontend.common.target_gpu import TargetGpu
from remat.frontend.common.torch_modes import attributes_set

Tensor = torch.Tensor
_aten = torch.ops.aten

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def cudnn_convolution_layouts() -> AbstractContextManager[None]:
    """Return a context in which fake convolutions have the layouts of cuDNN. For captures, which
    run one at a time."""
    return attributes_set((torch._C, "_conv_determine_backend_memory_format", _cudnn_memory_format))


def _cudnn_memory_format(
    x: torch.Tensor, weight: torch.Tensor, backend: object
) -> torch.memory_format:
    """Return the memory format of a convolution's results: channels-last if input or weight is, but
    never in float64. Source: `cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h, torch
    2.11 to 2.15."""
    if torch.float64 in (x.dtype, weight.dtype):
        return torch.contiguous_format
    for tensor in (x, weight):
        memory_format = suggest_memory_format(tensor)
        if memory_format in _CHANNELS_LAST:
            return memory_format
    return torch.contiguous_format


def batch_norm_kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Replace `aten.batch_norm` on CUDA. Eager mode runs cuDNN's kernel where that is possible,
    else torch's own; a capture always takes torch's own. The operator called here selects between
    them when it runs, as eager mode does."""
    dtypes = {None if t is None else t.dtype for t in (weight, bias, mean, variance)}
    if training and None not in dtypes and len(dtypes) == 1:
        return _aten._batch_norm_with_update.default(
            x, weight, bias, mean, variance, momentum, eps
        )[0]
    return _aten._batch_norm_impl_index.default(
        x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled
    )[0]


def softmax_kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Replace `aten.softmax.int` on CUDA, whose kernel also converts float16 to float32."""
    return _aten._softmax.default(*_softmax_arguments(x, dim, dtype))


def log_softmax_kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Replace `aten.log_softmax.int` on CUDA, whose kernel also converts float16 to float32."""
    return _aten._log_softmax.default(*_softmax_arguments(x, dim, dtype))


def _softmax_arguments(x: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, int, bool]:
    """Return input, dimension and `half_to_float`: True where the kernel converts the input."""
    if x.dtype == torch.float16 and dtype == torch.float32:
        return x, dim, True
    return (x if dtype is None else x.to(dtype)), dim, False


CUDA_KERNELS: Mapping[OpOverload, Callable[..., Tensor]] = {
    _aten.batch_norm.default: batch_norm_kernel
}
"""Kernels for tensors on a GPU."""


def absent_gpu_kernels(target: TargetGpu) -> Mapping[OpOverload, Callable[..., Tensor]]:
    """Return the kernels for CPU tensors of a step on the absent GPU `target`."""
    return {
        **CUDA_KERNELS,
        _aten.scaled_dot_product_attention.default: attention_kernel(target.capability),
        _aten.softmax.int: softmax_kernel,
        _aten.log_softmax.int: log_softmax_kernel,
    }
