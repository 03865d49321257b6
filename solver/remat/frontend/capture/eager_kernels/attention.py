"""`scaled_dot_product_attention` as a CUDA GPU runs it, for a GPU that this machine does not have.

Torch selects one of four kernels by dtypes, shapes, mask, dropout and GPU. The rules here are those
of torch 2.15 (`select_sdp_backend` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the
operations before and after the kernels are in attention.cpp of the same source folder), with the
cuDNN of its wheels. `_IS_TORCH_2_12` and `_IS_TORCH_2_14` mark what older versions do not do yet.
The user's switches count (`torch.backends.cuda.enable_flash_sdp`,
`torch.nn.attention.sdpa_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
_aten = torch.ops.aten

_VERSION = tuple(int(n) for n in torch.__version__.split(".")[:2])
_IS_TORCH_2_12 = _VERSION >= (2, 12)
"""True from torch 2.12 on. There, cuDNN refuses a dropout that is no multiple of 1/16, to which
some of its kernels round (pytorch 174245)."""
_IS_TORCH_2_14 = _VERSION >= (2, 14)
"""True from torch 2.14 on. There, efficient attention supports grouped heads, cuDNN supports heads
of 256, and all kernels support one key head for all query heads."""

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MIN_CAPABILITY, _MAX_CAPABILITY = (8, 0), (12, 1)
"""The range of compute capabilities of flash attention and cuDNN."""
_CUDNN_MASKED_BIAS = -65504.0
"""The bias of masked positions for cuDNN: the lowest float16 number."""
_DEFAULT_PRIORITY = ("flash", "efficient", "math", "cudnn")
_KERNEL_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Kernel names by their number in torch's `SDPBackend`."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`, and the GPU's compute capability."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: tuple[int, int]

    @property
    def heads(self) -> tuple[int, int, int]:
        """The number of heads of query, key and value."""
        return self.query.shape[1], self.key.shape[1], self.value.shape[1]

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """The size of one head of query, key and value."""
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]

    @property
    def requires_backward(self) -> bool:
        """True if a gradient of query, key or value is needed."""
        return torch.is_grad_enabled() and any(
            t.requires_grad for t in (self.query, self.key, self.value)
        )


def attention_kernel(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """Return a replacement of `aten.scaled_dot_product_attention`: on CPU tensors, it calls the
    operator that a GPU of this compute capability runs."""
    inverts_boolean_masks()  # called before the capture, whose modes it must not see

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = AttentionCall(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability
        )
        qkv = (query, key, value)
        kernel = select_attention_kernel(call)
        if kernel == "flash":
            size = query.shape[-1]
            padded = (functional.pad(t, (0, -size % 8)) if size % 8 else t for t in qkv)
            scale = size**-0.5 if scale is None else scale
            output = _aten._scaled_dot_product_flash_attention.default(
                *padded, dropout_p, is_causal, False, scale=scale
            )[0]
            return output[..., :size] if size % 8 else output
        if kernel == "cudnn":
            bias = _attention_bias(attn_mask, query.dtype, _CUDNN_MASKED_BIAS)
            return _aten._scaled_dot_product_cudnn_attention.default(
                *qkv, bias, call.requires_backward, dropout_p, is_causal, False, scale=scale
            )[0]
        bias = _attention_bias(attn_mask, query.dtype, float("-inf"))
        if kernel == "efficient":
            if bias is not None:
                bias = _aligned_attention_bias(bias).expand(*query.shape[:3], key.shape[2])
            return _aten._scaled_dot_product_efficient_attention.default(
                *qkv, bias, call.requires_backward, dropout_p, is_causal, scale=scale
            )[0]
        return _aten._scaled_dot_product_attention_math.default(
            *qkv, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return scaled_dot_product_attention


def select_attention_kernel(call: AttentionCall) -> str:
    """Return "flash", "efficient", "cudnn" or "math": the first kernel in torch's order of priority
    that is enabled and supports the call, "math" if none does."""
    cuda = torch.backends.cuda
    is_usable = {
        "flash": lambda: cuda.flash_sdp_enabled() and _supports_flash_attention(call),
        "efficient": lambda: (
            cuda.mem_efficient_sdp_enabled() and _supports_efficient_attention(call)
        ),
        "cudnn": lambda: cuda.cudnn_sdp_enabled() and _supports_cudnn_attention(call),
        "math": cuda.math_sdp_enabled,
    }
    priority = _kernel_priority(call.capability)
    return next((name for name in priority if is_usable[name]()), "math")


def _kernel_priority(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of the kernels in torch's order of priority. cuDNN comes first on Hopper and
    on Blackwell data centre GPUs, unless the user has set an order."""
    numbers = torch._C._get_sdp_priority_order()
    priority = tuple(_KERNEL_NAMES[number] for number in numbers if number in _KERNEL_NAMES)
    if priority == _DEFAULT_PRIORITY and capability[0] in (9, 10):
        return ("cudnn", *priority[:3])
    return priority


def _supports_flash_attention(call: AttentionCall) -> bool:
    sizes = call.head_sizes
    # Its backward has no kernel for these head sizes on GeForce and workstation GPUs.
    is_consumer_gpu = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    is_large_head = sizes[0] > 192 and not (call.dropout_p == 0 and sizes[0] > 224)
    return (
        _supports_fused_attention(call, has_gqa=True)
        and call.mask is None
        and len(set(sizes)) == 1
        and sizes[0] <= 256
        and _MIN_CAPABILITY <= call.capability <= _MAX_CAPABILITY
        and not (is_consumer_gpu and is_large_head and call.requires_backward)
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and call.query.dtype in _HALF_DTYPES
    )


def _supports_efficient_attention(call: AttentionCall) -> bool:
    query_size, key_size, value_size = call.head_sizes
    is_ampere = call.capability >= (8, 0)
    is_half = call.query.dtype in _HALF_DTYPES
    has_tensor_cores = is_ampere or (call.capability >= (7, 0) and is_half)
    alignment = max(4 if is_ampere else 1, (8 if is_half else 4) if has_tensor_cores else 1)
    offsets = (t.storage_offset() % alignment for t in (call.query, call.key, call.value))
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if is_ampere else ()))
    return (
        _supports_fused_attention(call, has_gqa=_IS_TORCH_2_14)
        and query_size == key_size
        and query_size > 0
        and value_size > 0
        and query_size % alignment == value_size % alignment == 0
        and not (is_ampere and any(offsets))
        and (5, 0) <= call.capability <= _MAX_CAPABILITY
        and call.query.dtype in dtypes
    )


def _supports_cudnn_attention(call: AttentionCall) -> bool:
    query_size, _, value_size = call.head_sizes
    sizes, largest_size = (query_size, value_size), max(query_size, value_size)
    is_data_center_gpu = call.capability[0] in (9, 10)
    is_size_supported = largest_size <= 128 or (is_data_center_gpu and sizes == (192, 128))
    if _IS_TORCH_2_14 and is_data_center_gpu and largest_size <= 256:
        is_size_supported |= not call.requires_backward or sizes == (256, 256)
    return (
        _supports_fused_attention(call, has_gqa=True)
        and is_size_supported
        and query_size % 8 == value_size % 8 == 0
        and _MIN_CAPABILITY <= call.capability <= _MAX_CAPABILITY
        and call.query.dtype in _HALF_DTYPES
        and max(call.query.shape[:2]) <= 65535
        and call.key.shape[2] != 1
        and (call.dropout_p == 0 or call.query.shape[2] != 1)
        and (not _IS_TORCH_2_12 or (call.dropout_p * 16).is_integer())
        and not _is_determinism_required()
        and (call.mask is None or _can_cudnn_broadcast_mask(call.mask, call))
    )


def _supports_fused_attention(call: AttentionCall, *, has_gqa: bool) -> bool:
    """True if the call meets the requirements that the three fused kernels share. `has_gqa`: the
    kernel supports grouped-query attention."""
    qkv = (call.query, call.key, call.value)
    if any(t.dim() != 4 for t in qkv) or len({t.dtype for t in qkv}) > 1:
        return False
    query, key, value = call.heads
    if call.enable_gqa and has_gqa:
        are_heads_supported = key == value and key > 0 and query % key == 0
    else:
        are_heads_supported = query == key == value or (_IS_TORCH_2_14 and key == value == 1)
    is_last_dimension_dense = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in qkv)
    return (
        are_heads_supported
        and is_last_dimension_dense
        and len({t.shape[0] for t in qkv}) == 1
        and call.query.shape[2] > 0
        and call.key.shape[2] > 0
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _can_cudnn_broadcast_mask(mask: Tensor, call: AttentionCall) -> bool:
    """True if cuDNN can broadcast the mask to the attention scores."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    batch, heads, queries, _ = call.query.shape
    score_shape = (batch, heads, queries, call.key.shape[2])[-mask.dim() :]
    pairs = zip(mask.shape, score_shape, strict=True)
    return all(mask_size in (1, size) for mask_size, size in pairs)


def _is_determinism_required() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _attention_bias(mask: Tensor | None, dtype: torch.dtype, masked_bias: float) -> Tensor | None:
    """Return a boolean mask as a bias to add: `masked_bias` where it is False, else 0. Return any
    other mask, which is a bias already, and None unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    if inverts_boolean_masks():
        zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
        return _aten.where.ScalarSelf(mask.logical_not(), masked_bias, zero)
    masked = torch.scalar_tensor(masked_bias, dtype=dtype, device=mask.device)
    return _aten.where.ScalarSelf(mask, 0.0, masked)


class _CalledOperators(TorchDispatchMode):
    """A mode that records the operators that are called, in `operators`."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[object] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


@cache
def inverts_boolean_masks() -> bool:
    """True if this torch inverts a boolean mask before it makes a bias of it, as older versions do:
    one more operation, and a mask more in memory. The code is the same for CPU and CUDA."""
    x, mask = torch.ones(1, 1, 1, 8), torch.ones(1, 1, dtype=torch.bool)
    with _CalledOperators() as called, torch.no_grad():
        functional.scaled_dot_product_attention(x, x, x, mask)
    return _aten.logical_not.default in called.operators


def _aligned_attention_bias(bias: Tensor) -> Tensor:
    """Return the bias with rows that start at multiples of 8 elements, as the memory-efficient
    kernel requires; padded if necessary."""
    strides = bias.stride()[:-1]
    if all(stride % 8 == 0 for stride in strides) and bias.stride(-1) == 1:
        return bias
    row_size = bias.shape[-1]
    return functional.pad(bias, (0, 8 - row_size % 8))[..., :row_size]
