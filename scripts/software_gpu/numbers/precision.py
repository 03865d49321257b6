"""Operations that CUDA computes with more precision, or in more dtypes, than the CPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from scripts.software_gpu.numbers.operators import Operator, words
from torch import Tensor
from torch.utils import _pytree as pytree

LOW_PRECISION = (torch.float16, torch.bfloat16)

_IN_FLOAT32 = words(
    """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm_backward _batch_norm_with_update
    _native_batch_norm_legit_functional _batch_norm_with_update_functional batch_norm_backward
    _batch_norm_no_update _native_batch_norm_legit_no_training batch_norm_update_stats
    _fused_rms_norm _weight_norm_interface _weight_norm_interface_backward
    """
)
"""Normalizations, whose statistics CUDA keeps as float32."""


def is_computed_in_float32(operator: Operator) -> bool:
    """True if CUDA computes and returns float32 inside this operation for half precision."""
    return operator.base_name in _IN_FLOAT32


def in_float32(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with half-precision tensors as float32."""
    return {name: _raised(value) for name, value in arguments.items()}


def _raised(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in LOW_PRECISION:
        return value.float()
    if isinstance(value, torch.dtype) and value in LOW_PRECISION:
        return torch.float32
    if isinstance(value, list):
        return [_raised(one) for one in value]
    return value


def has_low_precision(arguments: Mapping[str, Any]) -> bool:
    """True if an argument is a half-precision tensor."""
    tensors = pytree.tree_leaves(dict(arguments))
    return any(isinstance(t, Tensor) and t.dtype in LOW_PRECISION for t in tensors)


def is_about_the_dtype(error: Exception) -> bool:
    """True if a CPU kernel reports that it does not support a dtype."""
    text = str(error)
    return any(
        part in text
        for part in ("not implemented for", "expected scalar type", "dtype", "Unsupported type")
    )
