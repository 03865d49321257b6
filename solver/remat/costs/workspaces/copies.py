"""Copies that kernels make of operands whose layout they do not support.

Matrix products copy an operand without a dense row or column, such as an expanded one. Pooling and
resizing copy images that are neither contiguous nor channels-last, others need contiguous ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    StorageFormula,
    contiguous_copy_bytes,
    during,
    is_contiguous,
    is_contiguous_layout,
    tensor_bytes,
)
from remat.documents.records import TensorMeta

CopyBytes = Callable[[TensorMeta], int]
"""A function that returns the bytes of the copy of an operand, 0 if it needs none."""


def image_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of an image batch: 0 if it is contiguous or channels-last."""
    channels_last = (0, *range(2, len(meta.shape)), 1)
    if is_contiguous(meta) or is_contiguous_layout(
        [meta.shape[d] for d in channels_last], [meta.stride[d] for d in channels_last]
    ):
        return 0
    return tensor_bytes(meta)


def matrix_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of a matrix for cuBLAS: 0 if its rows or its columns are dense
    and do not overlap. The dimensions before the last two do not count."""
    rows, columns = meta.shape[-2:]
    row_stride, column_stride = meta.stride[-2:]
    is_row_major = column_stride == 1 and row_stride >= max(1, columns)
    is_column_major = row_stride == 1 and column_stride >= max(1, rows)
    return 0 if is_row_major or is_column_major else tensor_bytes(meta)


def _vector_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of a vector for cuBLAS: 0 unless it is expanded."""
    return tensor_bytes(meta) if 0 in meta.stride and meta.shape[0] > 1 else 0


def operand_copies(call: OperatorCall, copies: dict[int, CopyBytes]) -> Allocations:
    """Yield the results, and the copies of the operands at some positions."""
    sizes = [
        copy_bytes(meta)
        for position, copy_bytes in copies.items()
        if (meta := call.optional_tensor(position)) is not None
    ]
    yield from call.result_bytes
    yield from during(sizes, ())


def copies_of(*positions: int, copy_bytes: CopyBytes = contiguous_copy_bytes) -> Formula:
    """Return the formula of an operator that copies operands at these positions, if necessary."""
    return partial(operand_copies, copies=dict.fromkeys(positions, copy_bytes))


def _roll(call: OperatorCall) -> Allocations:
    """Roll dimensions one after the other: a tensor for each but the last."""
    x, dims = call.tensor(0), call.argument(2, ())
    count = len(dims) if isinstance(dims, (list, tuple)) else 1
    yield from call.result_bytes
    yield from during([tensor_bytes(x)] if count > 1 else [contiguous_copy_bytes(x)], ())


def _im2col(call: OperatorCall) -> Allocations:
    """Unfold an image: a contiguous copy of it, and one more as a batch."""
    x = call.tensor(0)
    yield from call.result_bytes
    yield from during([tensor_bytes(x), contiguous_copy_bytes(x)], ())


def _grouped_matmul(call: OperatorCall) -> Allocations:
    """Matrix products of several groups: pointers and shapes of each group, and descriptors for
    each multiprocessor. Recorded for Hopper."""
    offsets = call.optional_tensor(2)
    groups = offsets.shape[0] if offsets is not None else call.tensor(0).shape[0]
    yield from call.result_bytes
    yield from during([60 * groups, 512 * call.device.multiprocessors], ())


def _adaptive_max_pool(call: OperatorCall) -> Allocations:
    """Pool a contiguous copy into contiguous results, which are copied if theirs are not."""
    x = call.tensor(0)
    yield from call.result_bytes
    results = [
        contiguous_copy_bytes(result.tensor) if image_copy_bytes(x) == 0 else 0
        for result in call.results
    ]
    yield from during([contiguous_copy_bytes(x), *results], ())


def _col2im_storage(call: OperatorCall) -> tuple[int, ...]:
    """Return the bytes of the storage of a folded image, which is as large as its columns."""
    return (tensor_bytes(call.tensor(0)),)


STORAGES: dict[str, StorageFormula] = {"aten.col2im.default": _col2im_storage}

_matrices: dict[int, CopyBytes] = {0: matrix_copy_bytes, 1: matrix_copy_bytes}
_added_matrices: dict[int, CopyBytes] = {1: matrix_copy_bytes, 2: matrix_copy_bytes}

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        ("aten.mm.default", "aten.mm.dtype", "aten.bmm.default", "aten.bmm.dtype"),
        partial(operand_copies, copies=_matrices),
    ),
    **dict.fromkeys(
        ("aten.addmm.default", "aten.baddbmm.default", "aten._addmm_activation.default"),
        partial(operand_copies, copies=_added_matrices),
    ),
    "aten._grouped_mm.default": _grouped_matmul,
    "aten.mv.default": partial(
        operand_copies, copies={0: matrix_copy_bytes, 1: _vector_copy_bytes}
    ),
    "aten.addmv.default": partial(
        operand_copies, copies={1: matrix_copy_bytes, 2: _vector_copy_bytes}
    ),
    "aten.avg_pool2d.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.avg_pool2d_backward.default": copies_of(0, 1, copy_bytes=image_copy_bytes),
    "aten._adaptive_avg_pool2d.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten._adaptive_avg_pool2d_backward.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.adaptive_max_pool2d.default": _adaptive_max_pool,
    "aten.max_pool2d_with_indices.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.max_pool2d_with_indices_backward.default": copies_of(
        0, 1, 7, copy_bytes=image_copy_bytes
    ),
    "aten.upsample_nearest2d.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.upsample_nearest2d_backward.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.upsample_bilinear2d_backward.default": copies_of(0, copy_bytes=image_copy_bytes),
    "aten.upsample_bicubic2d_backward.default": copies_of(0),
    "aten.reflection_pad2d.default": copies_of(0),
    "aten.reflection_pad2d_backward.default": copies_of(0),
    "aten.roll.default": _roll,
    "aten.im2col.default": _im2col,
}
