"""Kernels for captures of steps on CUDA: they call the operators that eager mode runs there.

They are registered in torch's Python dispatcher
(see `remat.frontend.capture.eager_kernels.overrides`). `CUDA_KERNELS` apply to tensors on a GPU,
where torch's capture takes other operators than eager mode. `absent_gpu_kernels` apply to CPU
tensors that stand for an absent GPU, and add what eager mode runs on CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._ops import OpOverload

from remat.frontend.capture.absent_gpu.attention import attention_kernel
from remat.frontend.common.target_gpu import TargetGpu

Tensor = torch.Tensor
_aten = torch.ops.aten


def batch_norm(
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


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Replace `aten.softmax.int` on CUDA, whose kernel also converts float16 to float32."""
    return _aten._softmax.default(*_softmax_arguments(x, dim, dtype))


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Replace `aten.log_softmax.int` on CUDA, whose kernel also converts float16 to float32."""
    return _aten._log_softmax.default(*_softmax_arguments(x, dim, dtype))


def _softmax_arguments(x: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, int, bool]:
    """Return input, dimension and `half_to_float`: True where the kernel converts the input."""
    if x.dtype == torch.float16 and dtype == torch.float32:
        return x, dim, True
    return (x if dtype is None else x.to(dtype)), dim, False


CUDA_KERNELS: Mapping[OpOverload, Callable[..., Tensor]] = {_aten.batch_norm.default: batch_norm}
"""Kernels for tensors on a GPU."""


def absent_gpu_kernels(target: TargetGpu) -> Mapping[OpOverload, Callable[..., Tensor]]:
    """Return the kernels for CPU tensors of a step on the absent GPU `target`."""
    return {
        **CUDA_KERNELS,
        _aten.scaled_dot_product_attention.default: attention_kernel(target.capability),
        _aten.softmax.int: softmax,
        _aten.log_softmax.int: log_softmax,
    }
