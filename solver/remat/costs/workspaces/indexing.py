"""Lookups by index tensors and their gradients; sorts, scans and selections by CUB.

Gradients of repeated indices are added in a fixed order: torch sorts the indices, and for large
embedding tables adds up to ten rows at a time into a buffer.

Radix sorts of more elements than one tile need a second buffer for keys and values, histograms, and
a counter for each digit and tile. Scans need a state for each tile. The sizes of tiles are from
CUB in CUDA 13 (cub/device/dispatch/tuning), as recorded for compute capability 8.0, 9.0 and 10.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from remat.costs.devices import DeviceSpec
from remat.costs.layouts import is_contiguous_layout, item_bytes, tensor_bytes
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    buffers_during,
    contiguous_copy_bytes,
    results_and_buffers,
)
from remat.costs.workspaces.reductions import accumulator_bytes
from remat.documents.records import TensorMeta

INDEX_BYTES = 8
_DIGITS = 256
"""Values of one digit of a radix sort, of 8 bits."""
_STORAGE_ALIGNMENT = 256
_SORT_TILES = {8: 4608, 4: 5376, 2: 5632, 1: 3456}
"""Elements of one tile of a radix sort, by the bytes of a key, from Hopper (9.0) on."""
_SORT_TILES_AMPERE = {8: 3840, 4: 3072}
_SPINE_BLOCKS = {2: 5 * 8, 1: 5 * 4}
"""Thread blocks of a multiprocessor that sort small keys before Hopper, by the bytes of a key: five
times as many as can be resident by their number of threads."""
_SCAN_TILES = {8: (896, 16), 4: (1920, 8), 2: (7680, 16), 1: (7680, 16)}
"""Elements of one tile of a scan, and bytes of its state, by the bytes of an element."""
_SMALL_SORT = 4096
"""Elements of a dimension up to which torch sorts in place."""


def _cub_storage_bytes(*sizes: int) -> int:
    """Return the bytes of CUB's temporary storage for arrays of these sizes."""
    aligned = (-(-size // _STORAGE_ALIGNMENT) * _STORAGE_ALIGNMENT for size in sizes)
    return sum(aligned) + _STORAGE_ALIGNMENT - 1


def radix_sort_bytes(
    device: DeviceSpec, count: int, key_bytes: int, value_bytes: int, bits: int | None = None
) -> int:
    """Return the bytes of temporary storage of a radix sort of pairs; `bits` is the number of
    significant bits of the keys, all by default."""
    if count <= 256 * (19 * 4 // max(key_bytes, value_bytes, 4)):
        return 1  # one thread block sorts them
    passes = -(-(8 * key_bytes if bits is None else bits) // 8)
    is_ampere = device.capability is not None and device.capability < (9, 0)
    if is_ampere and key_bytes < 4:
        spine = (device.multiprocessors * _SPINE_BLOCKS[key_bytes] + 44) * _DIGITS * 4
        return _cub_storage_bytes(spine, count * key_bytes, count * value_bytes)
    tiles = -(-count // (_SORT_TILES_AMPERE if is_ampere else _SORT_TILES)[key_bytes])
    buffers = (count * key_bytes, count * value_bytes) if passes > 1 else (0, 0)
    return _cub_storage_bytes(passes * _DIGITS * 8, tiles * _DIGITS * 4, *buffers, 4 * passes)


def scan_bytes(count: int, item: int) -> int:
    """Return the bytes of temporary storage of a scan: a state for each tile, and 32 more."""
    tile, state = _SCAN_TILES[item]
    return _cub_storage_bytes((-(-count // tile) + 32) * state, 1)


def _is_vector(x: TensorMeta) -> bool:
    """True if all elements are along one dimension."""
    return 0 < prod(x.shape) == max(x.shape, default=1)


def _cumulative_workspace(call: OperatorCall) -> Iterator[int]:
    """Yield the buffers of a cumulative sum or product: converted and contiguous copies of the
    operand if it needs them, and for a vector the storage of a scan."""
    x, dtype = call.tensor(0), call.results[0].tensor.dtype
    if x.dtype != dtype:
        yield tensor_bytes(x, dtype)
    if contiguous_copy_bytes(x):
        yield tensor_bytes(x, dtype)
    if _is_vector(x):
        yield scan_bytes(prod(x.shape), item_bytes(dtype))


def _dimension_length(call: OperatorCall, dim: object) -> int:
    """Return the size of a dimension of the first operand."""
    shape = call.tensor(0).shape
    return shape[dim] if shape and isinstance(dim, int) else 1


def _sort_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of a sort along one dimension: none but indices if it is short; for a
    vector or a very long dimension the storage of a radix sort; else a sort of all elements."""
    x = call.tensor(0)
    length = _dimension_length(call, call.kwargs.get("dim", call.argument(1, -1)))
    count, key = prod(x.shape), item_bytes(x.dtype)
    if length <= _SMALL_SORT:
        return [INDEX_BYTES * length]
    if count == length or length >= 1_000_000:
        return [INDEX_BYTES * length, radix_sort_bytes(call.device, length, key, INDEX_BYTES)]
    storage = radix_sort_bytes(call.device, count, key, INDEX_BYTES)
    return [INDEX_BYTES * count, INDEX_BYTES * count, key * count, storage]


_TOPK_LENGTHS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Number of slices, and their length from which several thread blocks select from each."""


def _topk_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of selecting the largest elements of each slice: a contiguous copy, and
    for long slices, which several thread blocks share, counts of digits and a scan."""
    x = call.tensor(0)
    length = _dimension_length(call, call.argument(2, -1))
    slices = prod(x.shape) // max(length, 1)
    threshold = next((least for most, least in _TOPK_LENGTHS if slices <= most), 400)
    if length < threshold:
        return [contiguous_copy_bytes(x)]
    resident_threads = call.device.multiprocessors * 6 * 256
    items = min(max(-(-length * slices // resident_threads), 4), 64)
    blocks = slices * -(-length // (256 * items))
    item = item_bytes(x.dtype)
    by_slice = [item * slices, INDEX_BYTES * slices, 2 * max(item, 4) * slices]
    by_block = [2 * _DIGITS * blocks, 4 * _DIGITS * slices, 4 * blocks, 4 * blocks]
    return [contiguous_copy_bytes(x), *by_slice, *by_block, scan_bytes(blocks, 8)]


_UNSORTED_INDICES = 3072
"""Number of indices up to which the gradient of an embedding is added without a sort."""
_ROWS_OF_A_SUM = 10


def _bit_count(number: int) -> int:
    """Return the number of bits of the numbers up to `number`."""
    return max(1, number.bit_length())


def _embedding_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of looking up rows: a copy of indices that are not contiguous."""
    yield from buffers_during([contiguous_copy_bytes(call.tensor(1))], call.result_bytes)


def _embedding_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the gradient of an embedding table. Many indices are sorted, and
    their rows are added in groups of ten, at most one group more for each row of the table."""
    grad, indices = call.tensor(0), call.tensor(1)
    rows, is_scaled = call.integer(2), call.argument(4) is True
    count, width = prod(indices.shape), grad.shape[-1]
    copies = [contiguous_copy_bytes(grad), contiguous_copy_bytes(indices)]
    if count <= _UNSORTED_INDICES and not is_scaled:
        yield from buffers_during(copies, call.result_bytes)
        return
    item = item_bytes(indices.dtype)
    size = item * count
    scan = scan_bytes(count, item)
    segments = min(count, rows)
    partial_sums = count // _ROWS_OF_A_SUM + segments

    def sums() -> Iterator[int]:
        yield from call.result_bytes
        yield from (size, INDEX_BYTES)
        yield from buffers_during([size, scan])
        partials = [item * segments] * 2
        row_bytes = width * accumulator_bytes(grad.dtype)
        if partial_sums > 4 * rows and rows < 4 * call.device.multiprocessors:
            row_bytes = item  # few rows: added directly, without a buffer for partial sums
        buffers = [partial_sums * item, partial_sums * row_bytes]
        yield from buffers_during([*partials, INDEX_BYTES, *buffers])
        yield from (-size, -INDEX_BYTES)

    def sorted_indices() -> Iterator[int]:
        yield from buffers_during(
            [size, radix_sort_bytes(call.device, count, item, item, _bit_count(rows))], ()
        )
        yield from buffers_during([size] if is_scaled else [], (*buffers_during([scan]), *sums()))

    yield from buffers_during([*copies, size, size], sorted_indices())


def _index_tensors(call: OperatorCall) -> list[TensorMeta]:
    """Return the index tensors of a call, without the dimensions that are not indexed."""
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


def _index_copy_bytes(indices: Sequence[TensorMeta]) -> list[int]:
    """Return the bytes of the copies of index tensors: 32-bit ones are converted to 64 bits, and if
    their strides differ after broadcasting, all that are not contiguous are copied."""
    shape = _broadcast_shape(indices)
    size = INDEX_BYTES * prod(shape)
    converted = [tensor_bytes(t, "int64") for t in indices if t.dtype == "int32"]
    strides = [_broadcast_strides(t, shape) for t in indices]
    if len(set(strides)) <= 1:
        return converted
    return converted + [size for s in strides if not is_contiguous_layout(shape, s)]


def _index_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of looking up elements by index tensors: copies of these."""
    yield from buffers_during(_index_copy_bytes(_index_tensors(call)), call.result_bytes)


def _index_put_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of writing or adding elements by index tensors: copies of these; to
    add, copies of the values and of the operand, and a sort of the indices."""
    x, values, indices = call.tensor(0), call.tensor(2), _index_tensors(call)
    yield from call.result_bytes
    if call.argument(3) is not True:
        yield from buffers_during(_index_copy_bytes(indices), ())
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
    yield from buffers_during(
        copies, (*buffers_during(checks), *buffers_during([size, size, size, size, storage]))
    )


def _value_copy_bytes(
    x: TensorMeta,
    values: TensorMeta,
    index_shape: Sequence[int],
    indexed: Sequence[int],
    is_split: bool,
) -> int:
    """Return the bytes of the copy that makes the added values contiguous in their full shape; 0 if
    they are. The dimensions `indexed` of `x` are replaced by the index shape: at their place, or in
    front if other dimensions are between them (`is_split`)."""
    others = [size for dim, size in enumerate(x.shape) if dim not in indexed]
    start = 0 if is_split else indexed[0]
    shape = (*others[:start], *index_shape, *others[start:])
    if is_contiguous_layout(shape, _broadcast_strides(values, shape)):
        return 0
    return prod(shape) * item_bytes(values.dtype)


def _masked_scatter_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of copying elements where a mask is true: the mask as 64-bit integers, and
    the storage of a scan of it."""
    count = prod(call.tensor(1).shape)
    return [INDEX_BYTES * count, scan_bytes(count, INDEX_BYTES)]


FORMULAS: dict[str, Formula] = {
    "aten.cumsum.default": results_and_buffers(_cumulative_workspace),
    "aten.cumprod.default": results_and_buffers(_cumulative_workspace),
    "aten.logcumsumexp.default": results_and_buffers(_cumulative_workspace),
    "aten.sort.default": results_and_buffers(_sort_workspace),
    "aten.sort.stable": results_and_buffers(_sort_workspace),
    "aten.topk.default": results_and_buffers(_topk_workspace),
    "aten.embedding.default": _embedding_workspace,
    "aten.embedding_dense_backward.default": _embedding_backward_workspace,
    "aten.index.Tensor": _index_workspace,
    "aten._unsafe_index.Tensor": _index_workspace,
    "aten.index_put.default": _index_put_workspace,
    "aten._unsafe_index_put.default": _index_put_workspace,
    "aten.masked_scatter.default": results_and_buffers(_masked_scatter_workspace),
}
