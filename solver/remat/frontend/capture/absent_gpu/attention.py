"""`scaled_dot_product_attention` as a CUDA device runs it, for a device that is not here.

Which of four ways torch takes follows from dtypes, shapes, mask, dropout and the GPU. The rules are
those of torch 2.15 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`;
what is done before and after the kernels is in attention.cpp beside it), with the cuDNN of its
wheels. Where the installed torch is older, `_RECENT` says what it does not do yet. Switches of the
user count (`torch.backends.cuda.enable_flash_sdp`, `torch.nn.attention.sdpa_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensor = torch.Tensor
_aten = torch.ops.aten

_RECENT = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 15)
"""Then memory-efficient attention takes grouped heads, cuDNN's heads of 256, and all of them one
key for every head."""

_HALF = (torch.float16, torch.bfloat16)
_FIRST, _LAST = (8, 0), (12, 1)  # the architectures of flash attention and cuDNN's
_LOWEST_OF_CUDNN = -65504.0
_DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention` on a device of this compute capability."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    grouped: bool
    capability: tuple[int, int]

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.query.shape[1], self.key.shape[1], self.value.shape[1]

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(
            t.requires_grad for t in (self.query, self.key, self.value)
        )


def attention(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """`aten.scaled_dot_product_attention` for a capture on tensors of the CPU."""

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
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
        qkv = (query, key, value)
        way = kernel(call)
        if way == "flash":
            size = query.shape[-1]
            padded = (functional.pad(t, (0, -size % 8)) if size % 8 else t for t in qkv)
            scale = size**-0.5 if scale is None else scale
            found = _aten._scaled_dot_product_flash_attention.default(
                *padded, dropout_p, is_causal, False, scale=scale
            )[0]
            return found[..., :size] if size % 8 else found
        if way == "cudnn":
            bias = _bias(attn_mask, query.dtype, _LOWEST_OF_CUDNN)
            return _aten._scaled_dot_product_cudnn_attention.default(
                *qkv, bias, call.trains, dropout_p, is_causal, False, scale=scale
            )[0]
        bias = _bias(attn_mask, query.dtype, float("-inf"))
        if way == "efficient":
            if bias is not None:
                bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
            return _aten._scaled_dot_product_efficient_attention.default(
                *qkv, bias, call.trains, dropout_p, is_causal, scale=scale
            )[0]
        return _aten._scaled_dot_product_attention_math.default(
            *qkv, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return scaled_dot_product_attention


def kernel(call: Call) -> str:
    """ "flash", "efficient", "cudnn" or "math": the first of torch's order that can."""
    can = {
        "flash": lambda: torch.backends.cuda.flash_sdp_enabled() and _flash(call),
        "efficient": lambda: torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient(call),
        "cudnn": lambda: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(call),
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return next((name for name in _order(call.capability) if can[name]()), "math")


def _order(capability: tuple[int, int]) -> tuple[str, ...]:
    """On Hopper and Blackwell's data centre GPUs cuDNN comes first, unless the user says else."""
    numbers = torch._C._get_sdp_priority_order()
    order = tuple(_NAMES[number] for number in numbers if number in _NAMES)
    if order == _DEFAULT_ORDER and capability[0] in (9, 10):
        return ("cudnn", *order[:3])
    return order


def _flash(call: Call) -> bool:
    sizes = call.head_sizes
    # Its backward has no kernel for such heads on GeForce and workstation architectures.
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    wide = sizes[0] > 192 and not (call.dropout_p == 0 and sizes[0] > 224)
    return (
        _common(call, grouped=True)
        and call.mask is None
        and len(set(sizes)) == 1
        and sizes[0] <= 256
        and _FIRST <= call.capability <= _LAST
        and not (small and wide and call.trains)
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and call.query.dtype in _HALF
    )


def _efficient(call: Call) -> bool:
    query, _, values = call.head_sizes
    recent = call.capability >= (8, 0)
    half = call.query.dtype in _HALF
    tensor_cores = recent or (call.capability >= (7, 0) and half)
    alignment = max(4 if recent else 1, (8 if half else 4) if tensor_cores else 1)
    offsets = (t.storage_offset() % alignment for t in (call.query, call.key, call.value))
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if recent else ()))
    return (
        _common(call, grouped=_RECENT)
        and query == call.head_sizes[1]
        and query > 0
        and values > 0
        and query % alignment == values % alignment == 0
        and not (recent and any(offsets))
        and (5, 0) <= call.capability <= _LAST
        and call.query.dtype in dtypes
    )


def _cudnn(call: Call) -> bool:
    query, _, values = call.head_sizes
    server = call.capability[0] in (9, 10)
    fits = max(query, values) <= 128 or (server and (query, values) == (192, 128))
    if _RECENT and server and max(query, values) <= 256:
        fits = fits or not call.trains or (query, values) == (256, 256)
    return (
        _common(call, grouped=True)
        and fits
        and query % 8 == values % 8 == 0
        and _FIRST <= call.capability <= _LAST
        and call.query.dtype in _HALF
        and max(call.query.shape[:2]) <= 65535
        and call.key.shape[2] != 1
        and (call.dropout_p == 0 or call.query.shape[2] != 1)
        and (call.dropout_p * 16).is_integer()
        and not _only_deterministic()
        and (call.mask is None or _is_broadcast(call.mask, call))
    )


def _common(call: Call, *, grouped: bool) -> bool:
    """What all three fused kernels ask of their operands."""
    qkv = (call.query, call.key, call.value)
    if any(t.dim() != 4 for t in qkv) or len({t.dtype for t in qkv}) > 1:
        return False
    query, key, value = call.heads
    if call.grouped and grouped:
        heads = key == value and key > 0 and query % key == 0
    else:
        heads = query == key == value or (_RECENT and key == value == 1)
    dense = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in qkv)
    return (
        heads
        and dense
        and len({t.shape[0] for t in qkv}) == 1
        and call.query.shape[2] > 0
        and call.key.shape[2] > 0
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _is_broadcast(mask: Tensor, call: Call) -> bool:
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    batch, heads, queries, _ = call.query.shape
    sizes = (batch, heads, queries, call.key.shape[2])[-mask.dim() :]
    return all(found in (1, size) for found, size in zip(mask.shape, sizes, strict=True))


def _only_deterministic() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _bias(mask: Tensor | None, dtype: torch.dtype, lowest: float) -> Tensor | None:
    """A mask of truth values as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return _aten.where.ScalarSelf(mask.logical_not(), lowest, zero)


def _aligned(bias: Tensor) -> Tensor:
    """Rows of the bias at multiples of eight elements, as the memory-efficient kernel wants."""
    strides = bias.stride()[:-1]
    if all(step % 8 == 0 for step in strides) and bias.stride(-1) == 1:
        return bias
    tokens = bias.shape[-1]
    return functional.pad(bias, (0, 8 - tokens % 8))[..., :tokens]
