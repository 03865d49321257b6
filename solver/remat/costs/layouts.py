"""Layouts of tensors in memory: bytes of elements, spans, contiguity, dense strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from remat.documents.records import TensorMeta

HALF_DTYPES = ("float16", "bfloat16")

_ITEM_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element (1 for bool, int8 and the 8-bit floats)."""
    return _ITEM_BYTES.get(dtype, 1)


def tensor_bytes(meta: TensorMeta, dtype: str | None = None) -> int:
    """Return the bytes of a contiguous tensor of this shape, in `dtype` if that is not None."""
    return prod(meta.shape) * item_bytes(dtype or meta.dtype)


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of memory from a tensor's first element to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def span_bytes(meta: TensorMeta) -> int:
    """Return the bytes from a tensor's first element to its last."""
    return span_elements(meta.shape, meta.stride) * item_bytes(meta.dtype)


def is_contiguous(meta: TensorMeta) -> bool:
    """True if a tensor's elements are in memory in the order of its dimensions, without gaps."""
    return is_contiguous_layout(meta.shape, meta.stride)


def is_contiguous_in_order(meta: TensorMeta, order: Sequence[int]) -> bool:
    """True if a tensor is contiguous once its dimensions are permuted into this order."""
    return is_contiguous_layout([meta.shape[d] for d in order], [meta.stride[d] for d in order])


def channels_last_order(meta: TensorMeta) -> tuple[int, ...]:
    """Return the dimensions of an image batch in the order of the memory format channels-last, the
    fastest last."""
    return (0, *range(2, len(meta.shape)), 1)


def is_contiguous_layout(shape: Iterable[int], stride: Iterable[int]) -> bool:
    """True if a tensor with this shape and these strides is contiguous. Strides of dimensions of
    size 1 do not count."""
    expected = 1
    for size, step in reversed(list(zip(shape, stride, strict=True))):
        if size == 0:
            return True
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def dense_meta(like: TensorMeta, shape: Sequence[int], dtype: str | None = None) -> TensorMeta:
    """Return the metadata of a contiguous tensor of this shape, with the dtype and device of
    another tensor."""
    sizes = accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1)
    stride = tuple(sizes)[::-1] if shape else ()
    return TensorMeta(
        dtype=dtype or like.dtype, shape=tuple(shape), stride=stride, device=like.device
    )


def contiguous_meta(meta: TensorMeta) -> TensorMeta:
    """Return the metadata of a tensor after `contiguous()`: unchanged if it is contiguous."""
    return meta if is_contiguous(meta) else dense_meta(meta, meta.shape)


def converted_meta(meta: TensorMeta, dtype: str) -> TensorMeta:
    """Return the metadata of a tensor that is converted to a dtype: dense, with its dimensions in
    the same order in memory."""
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    ordered = dense_meta(meta, [meta.shape[dim] for dim in order], dtype)
    strides = dict(zip(order, ordered.stride, strict=True))
    return ordered.model_copy(
        update={"shape": meta.shape, "stride": tuple(strides[dim] for dim in range(len(order)))}
    )
