"""Kernels for captures of steps on CUDA: what eager mode runs there, in torch's Python dispatcher
(see `remat.frontend.capture.eager_kernels.overrides`).

`HERE` is for tensors on a GPU, where torch's capture takes something else than eager mode runs.
`elsewhere` is for a GPU that is not here, on tensors of the CPU: also what eager mode runs on CUDA
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._ops import OpOverload

from remat.frontend.capture.absent_gpu.attention import attention
from remat.frontend.common.target import Target

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
    """`aten.batch_norm`. Eager mode runs cuDNN's where that can, else torch's own. A capture takes
    the latter; here it is the operation that chooses as eager mode does, when it runs."""
    dtypes = {None if t is None else t.dtype for t in (weight, bias, mean, variance)}
    if training and None not in dtypes and len(dtypes) == 1:
        return _aten._batch_norm_with_update.default(
            x, weight, bias, mean, variance, momentum, eps
        )[0]
    return _aten._batch_norm_impl_index.default(
        x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled
    )[0]


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.softmax.int`: from float16 to float32 in one kernel."""
    return _aten._softmax.default(*_in_one_kernel(x, dim, dtype))


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.log_softmax.int`, as `softmax`."""
    return _aten._log_softmax.default(*_in_one_kernel(x, dim, dtype))


def _in_one_kernel(x: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, int, bool]:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return x, dim, True
    return (x if dtype is None else x.to(dtype)), dim, False


HERE: Mapping[OpOverload, Callable[..., Tensor]] = {_aten.batch_norm.default: batch_norm}


def elsewhere(target: Target) -> Mapping[OpOverload, Callable[..., Tensor]]:
    """The kernels of a capture for `target`."""
    return {
        **HERE,
        _aten.scaled_dot_product_attention.default: attention(target.capability),
        _aten.softmax.int: softmax,
        _aten.log_softmax.int: log_softmax,
    }
