"""Lookups by index tensors and their gradients.

Gradients of repeated indices are added in a fixed order: torch sorts the indices, and for large
embedding tables adds up to ten rows at a time into a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from remat.costs.roofline import item_bytes
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    contiguous_copy_bytes,
    during,
    is_contiguous_layout,
    tensor_bytes,
)
from remat.costs.workspaces.reductions import accumulator_bytes
from remat.costs.workspaces.sorting import INDEX_BYTES, radix_sort_bytes, scan_bytes
from remat.documents.records import TensorMeta

_UNSORTED_INDICES = 3072
"""Number of indices up to which the gradient of an embedding is added without a sort."""
_ROWS_OF_A_SUM = 10


def _bit_count(number: int) -> int:
    """Return the number of bits of the numbers up to `number`."""
    return max(1, number.bit_length())


def _embedding(call: OperatorCall) -> Allocations:
    """Look up rows: a copy of indices that are not contiguous."""
    yield from during([contiguous_copy_bytes(call.tensor(1))], call.result_bytes)


def _embedding_backward(call: OperatorCall) -> Allocations:
    """The gradient of an embedding table. Many indices are sorted, and their rows are added in
    groups of ten, at most one group more for each row of the table."""
    grad, indices = call.tensor(0), call.tensor(1)
    rows, is_scaled = call.integer(2), call.argument(4) is True
    count, width = prod(indices.shape), grad.shape[-1]
    copies = [contiguous_copy_bytes(grad), contiguous_copy_bytes(indices)]
    if count <= _UNSORTED_INDICES and not is_scaled:
        yield from during(copies, call.result_bytes)
        return
    item = item_bytes(indices.dtype)
    size = item * count
    scan = scan_bytes(count, item)
    segments = min(count, rows)
    partial_sums = count // _ROWS_OF_A_SUM + segments

    def sums() -> Iterator[int]:
        yield from call.result_bytes
        yield from (size, INDEX_BYTES)
        yield from during([size, scan], ())
        partials = [item * segments] * 2
        row_bytes = width * accumulator_bytes(grad.dtype)
        if partial_sums > 4 * rows and rows < 4 * call.device.multiprocessors:
            row_bytes = item  # few rows: added directly, without a buffer for partial sums
        buffers = [partial_sums * item, partial_sums * row_bytes]
        yield from during([*partials, INDEX_BYTES, *buffers], ())
        yield from (-size, -INDEX_BYTES)

    def sorted_indices() -> Iterator[int]:
        yield from during(
            [size, radix_sort_bytes(call.device, count, item, item, _bit_count(rows))], ()
        )
        yield from during([size] if is_scaled else [], (*during([scan], ()), *sums()))

    yield from during([*copies, size, size], sorted_indices())


def _index_tensors(call: OperatorCall) -> list[TensorMeta]:
    indices = call.argument(1)
    items: Sequence[object] = indices if isinstance(indices, tuple) else ()
    return [item for item in items if isinstance(item, TensorMeta)]


def _broadcast_shape(tensors: Sequence[TensorMeta]) -> tuple[int, ...]:
    """Return the common shape of tensors that are broadcast to each other."""
    rank = max((len(t.shape) for t in tensors), default=0)
    padded = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _broadcast_strides(meta: TensorMeta, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that is expanded to a shape: 0 where it is repeated."""
    missing = len(shape) - len(meta.shape)
    sizes, strides = (1,) * missing + meta.shape, (0,) * missing + meta.stride
    return tuple(
        0 if size == 1 and target != 1 else stride
        for size, stride, target in zip(sizes, strides, shape, strict=True)
    )


def _index_copies(indices: Sequence[TensorMeta]) -> list[int]:
    """Return the bytes of the copies of index tensors: several ones with different strides are
    made contiguous, and 32-bit indices become 64-bit ones."""
    shape = _broadcast_shape(indices)
    size = INDEX_BYTES * prod(shape)
    converted = [tensor_bytes(t, "int64") for t in indices if t.dtype == "int32"]
    strides = [_broadcast_strides(t, shape) for t in indices]
    if len(set(strides)) <= 1:
        return converted
    return converted + [size for s in strides if not is_contiguous_layout(shape, s)]


def _index(call: OperatorCall) -> Allocations:
    """Look up elements by index tensors."""
    yield from during(_index_copies(_index_tensors(call)), call.result_bytes)


def _index_put(call: OperatorCall) -> Allocations:
    """Write or add elements by index tensors. To add, the indices are sorted."""
    x, values, indices = call.tensor(0), call.tensor(2), _index_tensors(call)
    yield from call.result_bytes
    if call.argument(3) is not True:
        yield from during(_index_copies(indices), ())
        return
    shape = _broadcast_shape(indices)
    size = INDEX_BYTES * prod(shape)
    positions = call.argument(1)
    if not isinstance(positions, tuple) or not indices:
        raise TypeError("index_put without index tensors")
    indexed = [i for i, item in enumerate(positions) if isinstance(item, TensorMeta)]
    # Index tensors with other dimensions between them are moved to the front.
    is_split = indexed != list(range(indexed[0], indexed[-1] + 1))
    extent = prod(x.shape[i] for i in indexed) * (1 if is_split else prod(x.shape[: indexed[0]]))
    copies = [_value_copy_bytes(x, values, shape, indexed, is_split)]
    if is_split or contiguous_copy_bytes(x):
        copies.append(tensor_bytes(x))  # moved into the order in which indices come first
    storage = radix_sort_bytes(
        call.device, prod(shape), INDEX_BYTES, INDEX_BYTES, _bit_count(extent - 1)
    )
    # Each dimension's indices are checked and scaled before they are added up.
    checks = [INDEX_BYTES, INDEX_BYTES, size if len(indices) > 1 else 0, 1]
    yield from during(copies, (*during(checks, ()), *during([size, size, size, size, storage], ())))


def _value_copy_bytes(
    x: TensorMeta,
    values: TensorMeta,
    index_shape: Sequence[int],
    indexed: Sequence[int],
    is_split: bool,
) -> int:
    """Return the bytes of the copy that makes the added values contiguous in their full shape."""
    others = [size for dim, size in enumerate(x.shape) if dim not in indexed]
    start = 0 if is_split else indexed[0]
    shape = (*others[:start], *index_shape, *others[start:])
    if is_contiguous_layout(shape, _broadcast_strides(values, shape)):
        return 0
    return prod(shape) * item_bytes(values.dtype)


def _masked_scatter(call: OperatorCall) -> Allocations:
    """Copy elements where a mask is true: a scan of the mask, as 64-bit integers."""
    mask = call.tensor(1)
    count = prod(mask.shape)
    yield from call.result_bytes
    yield from during([INDEX_BYTES * count, scan_bytes(count, INDEX_BYTES)], ())


FORMULAS: dict[str, Formula] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.masked_scatter.default": _masked_scatter,
}
