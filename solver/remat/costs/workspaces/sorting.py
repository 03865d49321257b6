"""Sorts, scans and selections by CUB, and the temporary storage that they need.

Radix sorts of more elements than one tile need a second buffer for keys and values, histograms, and
a counter for each digit and tile. Scans need a state for each tile. The sizes of tiles are from
CUB in CUDA 13 (cub/device/dispatch/tuning), as recorded for compute capability 8.0, 9.0 and 10.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from remat.costs.devices import DeviceSpec
from remat.costs.roofline import item_bytes
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    contiguous_copy_bytes,
    during,
    tensor_bytes,
)
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


def _storage(*sizes: int) -> int:
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
        return _storage(spine, count * key_bytes, count * value_bytes)
    tiles = -(-count // (_SORT_TILES_AMPERE if is_ampere else _SORT_TILES)[key_bytes])
    buffers = (count * key_bytes, count * value_bytes) if passes > 1 else (0, 0)
    return _storage(passes * _DIGITS * 8, tiles * _DIGITS * 4, *buffers, 4 * passes)


def scan_bytes(count: int, item: int) -> int:
    """Return the bytes of temporary storage of a scan: a state for each tile, and 32 more."""
    tile, state = _SCAN_TILES[item]
    return _storage((-(-count // tile) + 32) * state, 1)


def _is_vector(x: TensorMeta) -> bool:
    """True if all elements are along one dimension."""
    return 0 < prod(x.shape) == max(x.shape, default=1)


def _cumulative(call: OperatorCall) -> Allocations:
    """A cumulative sum or product: of a vector by CUB, else without storage."""
    x, dtype = call.tensor(0), call.results[0].tensor.dtype
    copies = []
    if x.dtype != dtype:
        copies.append(tensor_bytes(x, dtype))
    if contiguous_copy_bytes(x):
        copies.append(tensor_bytes(x, dtype))

    def scan() -> Iterator[int]:
        if _is_vector(x):
            yield from during([scan_bytes(prod(x.shape), item_bytes(dtype))], ())

    yield from call.result_bytes
    yield from during(copies, scan())


def _dimension_length(call: OperatorCall, dim: object) -> int:
    """Return the size of a dimension of the first operand."""
    shape = call.tensor(0).shape
    return shape[dim] if shape and isinstance(dim, int) else 1


def _sort(call: OperatorCall) -> Allocations:
    """A sort: of a short dimension in place, of a vector by a radix sort, else of all elements by
    value and then by the place that they belong to."""
    x = call.tensor(0)
    length = _dimension_length(call, call.kwargs.get("dim", call.argument(1, -1)))
    count, key = prod(x.shape), item_bytes(x.dtype)
    yield from call.result_bytes
    if length <= _SMALL_SORT:
        yield from during([INDEX_BYTES * length], ())
    elif count == length or length >= 1_000_000:
        storage = radix_sort_bytes(call.device, length, key, INDEX_BYTES)
        yield from during([INDEX_BYTES * length, storage], ())
    else:
        storage = radix_sort_bytes(call.device, count, key, INDEX_BYTES)
        yield from during([INDEX_BYTES * count, INDEX_BYTES * count, key * count, storage], ())


_TOPK_LENGTHS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Number of slices, and their length from which several thread blocks select from each."""


def _topk(call: OperatorCall) -> Allocations:
    """The largest elements of each slice: by one thread block if it is short, else by several,
    which count the digits of their elements."""
    x = call.tensor(0)
    length = _dimension_length(call, call.argument(2, -1))
    slices = prod(x.shape) // max(length, 1)
    threshold = next((least for most, least in _TOPK_LENGTHS if slices <= most), 400)
    yield from call.result_bytes
    buffers = [contiguous_copy_bytes(x)]
    if length >= threshold:
        resident_threads = call.device.multiprocessors * 6 * 256
        items = min(max(-(-length * slices // resident_threads), 4), 64)
        blocks = slices * -(-length // (256 * items))
        item = item_bytes(x.dtype)
        buffers += [item * slices, INDEX_BYTES * slices, 2 * max(item, 4) * slices]
        buffers += [2 * _DIGITS * blocks, 4 * _DIGITS * slices, 4 * blocks, 4 * blocks]
        buffers.append(scan_bytes(blocks, 8))
    yield from during(buffers, ())


FORMULAS: dict[str, Formula] = {
    "aten.cumsum.default": _cumulative,
    "aten.cumprod.default": _cumulative,
    "aten.logcumsumexp.default": _cumulative,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.topk.default": _topk,
}
