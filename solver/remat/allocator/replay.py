"""A replay of torch's CUDA caching allocator, as pure data: the blocks and segments that a sequence
of allocations and frees creates, and the bytes that are then requested, allocated and reserved.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (`round_size`, `get_free_block`,
`should_split`, `get_allocation_size`, `try_merge_blocks`, `try_allocate_expandable_block`) with the
constants of `c10/core/AllocatorConfig.h`, as in torch 2.13 and 2.15:

* a request is rounded up to a multiple of 512 bytes; up to 1 MiB it is served from the small pool,
  above that from the large one;
* of the free blocks that are large enough the smallest is taken, of equal ones that of the lowest
  address. The remainder is split off: in the small pool from 512 bytes on, in the large one only if
  it is over 1 MiB. A remainder that is not split off counts as allocated;
* if no block fits, the device allocates a segment: 2 MiB for a small request, 20 MiB for one below
  10 MiB, or else the request rounded up to a multiple of 2 MiB;
* a freed block is merged with its free neighbours in the segment;
* with expandable segments each pool is one segment that grows at its end, in pages of 2 MiB (small)
  and 20 MiB (large), and every remainder from 512 bytes on is split off. Of the free blocks that
  fit, the one at the end is taken last.

The replay assumes one stream, the default settings, and a device that never runs out of memory:
then no segment is returned to the device, and no block waits for another stream. Segments get
rising addresses, as they mostly do. `tests/solver/allocator/test_replay.py` compares the replay
with recordings of torch's allocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT_BYTES = 512
SMALL_BYTES = 1 << 20
"""The largest request that the small pool serves, and the largest remainder of a large block that
is not split off."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
_MIN_SEPARATE_SEGMENT_BYTES = 10 << 20
"""Requests of this size and more get a segment of their own."""
_SEGMENT_ROUNDING_BYTES = 2 << 20


def round_size(size_bytes: int) -> int:
    """Return the size of a request rounded up to the allocator's alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class AllocationEvent(NamedTuple):
    """An allocation of `size_bytes` bytes under a key, or with None the free of that allocation."""

    key: Hashable
    size_bytes: int | None


class Block(NamedTuple):
    """A part of a segment, allocated or free. `requested_bytes` is None if it is free."""

    address: int
    size_bytes: int
    requested_bytes: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the device allocated at once: consecutive blocks. Addresses count from 0."""

    address: int
    is_small: bool
    blocks: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Peaks in bytes, which need not occur at the same time: of the requests, of the blocks in use
    (`torch.cuda.max_memory_allocated`), and of the segments (`max_memory_reserved`)."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def replay_events(
    events: Iterable[AllocationEvent], *, is_expandable: bool = False
) -> AllocatorPeaks:
    """Return the peaks of a sequence of events. Raises KeyError for a free of no allocation."""
    allocator = Allocator(is_expandable=is_expandable)
    for event in events:
        allocator.apply(event)
    return allocator.peaks


@dataclass(slots=True, eq=False)
class _BlockNode:
    """A block as a node of the doubly linked list of a segment's blocks."""

    address: int
    size_bytes: int
    is_small: bool
    requested_bytes: int | None = None
    before: _BlockNode | None = None
    after: _BlockNode | None = None


class Allocator:
    """The state of the caching allocator: its segments and blocks, and the peaks so far."""

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self._peak_bytes = (0, 0, 0)
        self._live: dict[Hashable, _BlockNode | None] = {}
        # The free blocks of the small (True) and the large pool, as (size, address).
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free_at: dict[int, _BlockNode] = {}  # by address
        self._first_blocks: list[_BlockNode] = []  # of each segment
        self._last_blocks: dict[bool, _BlockNode] = {}  # of the expandable segment of each pool
        self._next_address = 0

    @property
    def peaks(self) -> AllocatorPeaks:
        """The peaks so far."""
        return AllocatorPeaks(*self._peak_bytes)

    def apply(self, event: AllocationEvent) -> None:
        """Allocate or free a block. An allocation of 0 bytes has no block. Raises KeyError for a
        key that is allocated already, and for a free of no allocation."""
        if event.size_bytes is None:
            block = self._live.pop(event.key)
            if block is not None:
                self._free_block(block)
            return
        if event.key in self._live:
            raise KeyError(f"{event.key!r} is allocated already")
        self._live[event.key] = self._allocate_block(event.size_bytes) if event.size_bytes else None
        requested, allocated, reserved = self._peak_bytes
        self._peak_bytes = (
            max(requested, self.requested_bytes),
            max(allocated, self.allocated_bytes),
            max(reserved, self.reserved_bytes),
        )

    def address(self, key: Hashable) -> int | None:
        """Return the address of the allocation under a key, or None if it has 0 bytes. Raises
        KeyError if there is none."""
        block = self._live[key]
        return None if block is None else block.address

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments with their blocks, sorted by address."""
        segments: list[Segment] = []
        for first in self._first_blocks:
            blocks: list[Block] = []
            block: _BlockNode | None = first
            while block is not None:
                blocks.append(Block(block.address, block.size_bytes, block.requested_bytes))
                block = block.after
            segments.append(Segment(first.address, first.is_small, tuple(blocks)))
        return tuple(sorted(segments, key=lambda segment: segment.address))

    # -- blocks -----------------------------------------------------------------------------

    def _allocate_block(self, requested_bytes: int) -> _BlockNode:
        size = round_size(requested_bytes)
        is_small = size <= SMALL_BYTES
        block = self._take_best_fit(size, is_small)
        if block is None:
            block = (
                self._expand_segment(size, is_small)
                if self.is_expandable
                else self._new_segment(size)
            )
        remainder = block.size_bytes - size
        if (
            remainder >= ALIGNMENT_BYTES
            if is_small or self.is_expandable
            else remainder > SMALL_BYTES
        ):
            self._split_off_remainder(block, size)
        block.requested_bytes = requested_bytes
        self.requested_bytes += requested_bytes
        self.allocated_bytes += block.size_bytes
        return block

    def _take_best_fit(self, size: int, is_small: bool) -> _BlockNode | None:
        """Remove the smallest free block that is large enough from its pool, and return it; None if
        no block is large enough."""
        pool = self._pools[is_small]
        index = bisect_left(pool, (size, 0))
        if index == len(pool):
            return None
        # A block that can expand counts as larger than all others.
        last = self._last_blocks.get(is_small)
        if last is not None and pool[index][1] == last.address and index + 1 < len(pool):
            index += 1
        return self._free_at.pop(pool.pop(index)[1])

    def _new_segment(self, size: int) -> _BlockNode:
        """Allocate a segment of the device, and return it as one block that is in no pool."""
        is_small = size <= SMALL_BYTES
        segment_bytes = -(-size // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES
        if size < _MIN_SEPARATE_SEGMENT_BYTES:
            segment_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        block = _BlockNode(self._next_address, segment_bytes, is_small)
        self._next_address += segment_bytes
        self.reserved_bytes += segment_bytes
        self._first_blocks.append(block)
        return block

    def _expand_segment(self, size: int, is_small: bool) -> _BlockNode:
        """Grow the pool's segment, and return a large enough block at its end: the last block if
        that is free, or a new one."""
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        last = self._last_blocks.get(is_small)
        is_free = last is not None and last.requested_bytes is None
        missing_bytes = size - last.size_bytes if last is not None and is_free else size
        growth_bytes = -(-missing_bytes // page_bytes) * page_bytes
        self.reserved_bytes += growth_bytes
        if last is not None and is_free:
            self._remove_from_pool(last)
            last.size_bytes += growth_bytes
            return last
        # The start addresses are so distant that no segment ever reaches the other.
        start = (0 if is_small else 1 << 60) if last is None else last.address + last.size_bytes
        block = _BlockNode(start, growth_bytes, is_small, before=last)
        if last is None:
            self._first_blocks.append(block)
        else:
            last.after = block
        self._last_blocks[is_small] = block
        return block

    def _split_off_remainder(self, block: _BlockNode, size: int) -> None:
        """Split the remainder off a block, and add it to the pool."""
        rest = _BlockNode(
            block.address + size,
            block.size_bytes - size,
            block.is_small,
            before=block,
            after=block.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size_bytes = rest, size
        if self._last_blocks.get(block.is_small) is block:
            self._last_blocks[block.is_small] = rest
        self._add_to_pool(rest)

    def _free_block(self, block: _BlockNode) -> None:
        assert block.requested_bytes is not None
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        block.requested_bytes = None
        if block.after is not None and block.after.requested_bytes is None:
            self._remove_from_pool(block.after)
            self._merge_blocks(block, block.after)
        if block.before is not None and block.before.requested_bytes is None:
            self._remove_from_pool(block.before)
            block = self._merge_blocks(block.before, block)
        self._add_to_pool(block)

    def _merge_blocks(self, block: _BlockNode, after: _BlockNode) -> _BlockNode:
        """Merge a block with the next one, `after`, and return it. Neither may be in the pool."""
        block.size_bytes += after.size_bytes
        block.after = after.after
        if block.after is not None:
            block.after.before = block
        if self._last_blocks.get(block.is_small) is after:
            self._last_blocks[block.is_small] = block
        return block

    def _add_to_pool(self, block: _BlockNode) -> None:
        insort(self._pools[block.is_small], (block.size_bytes, block.address))
        self._free_at[block.address] = block

    def _remove_from_pool(self, block: _BlockNode) -> None:
        pool = self._pools[block.is_small]
        del pool[bisect_left(pool, (block.size_bytes, block.address))]
        del self._free_at[block.address]
