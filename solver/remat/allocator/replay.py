"""torch's caching allocator for CUDA, replayed as pure data: which blocks and segments a sequence
of allocations and frees makes, and how many bytes are then requested, allocated and reserved.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (`round_size`, `get_free_block`,
`should_split`, `get_allocation_size`, `try_merge_blocks`, `try_allocate_expandable_block`) with the
constants of `c10/core/AllocatorConfig.h`, as in torch 2.13 and 2.15:

* a request is rounded up to a multiple of 512 bytes; up to 1 MiB it is served from the small pool,
  above that from the large one;
* of the free blocks that are large enough the smallest is taken, of equal ones that of the lowest
  address. What it has too much is split off: in the small pool from 512 bytes, in the large one
  only what is over 1 MiB. What is not split off counts as allocated;
* where no block fits, a segment is asked for from the device: 2 MiB for a small request, 20 MiB for
  one below 10 MiB, else the request rounded up to 2 MiB;
* a block that is freed becomes one with its free neighbours in the segment;
* with expandable segments each pool is one segment that grows at its end, in pages of 2 MiB (small)
  and 20 MiB (large), and everything from 512 bytes is split off. Of the free blocks that fit, the
  one at the end is taken last.

One stream, the default settings, and a device that never runs out: then nothing is given back, and
no block of another stream is waited for. Segments get rising addresses, as they mostly do.
`tests/test_allocator.py` holds it against what torch's own allocator recorded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT_BYTES = 512
SMALL_BYTES = 1 << 20
"""The largest request that the small pool serves; what is left over it is split off a large one."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
_OWN_SEGMENT_BYTES = 10 << 20
_SEGMENT_ROUNDING_BYTES = 2 << 20


def rounded(size_bytes: int) -> int:
    """What is set aside for a request at least."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Event(NamedTuple):
    """An allocation of `size_bytes`, or with None the free of what was allocated under `key`."""

    key: Hashable
    size_bytes: int | None


class Block(NamedTuple):
    """A part of a segment. `requested_bytes` is None where it is free."""

    address: int
    size_bytes: int
    requested_bytes: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """What the device was asked for: consecutive blocks. Addresses count from 0."""

    address: int
    is_small: bool
    blocks: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks in bytes, each at its own time: what was requested, what the blocks in use take
    (`torch.cuda.max_memory_allocated`), what the segments take (`max_memory_reserved`)."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def replay(events: Iterable[Event], *, is_expandable: bool = False) -> Peaks:
    """The peaks of a sequence. Raises KeyError for a free of what is not there."""
    allocator = Allocator(is_expandable=is_expandable)
    for event in events:
        allocator.run(event)
    return allocator.peaks


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size_bytes: int
    is_small: bool
    requested_bytes: int | None = None
    before: _Block | None = None
    after: _Block | None = None


class Allocator:
    """The allocator's state; `run` takes events one by one."""

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self._peaks = Peaks(0, 0, 0)
        self._live: dict[Hashable, _Block | None] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address)
        self._at: dict[int, _Block] = {}  # free blocks by address
        self._first: list[_Block] = []  # of each segment
        self._tail: dict[bool, _Block] = {}  # the last block of each pool that can expand
        self._top = 0

    @property
    def peaks(self) -> Peaks:
        """The largest bytes so far."""
        return self._peaks

    def run(self, event: Event) -> None:
        """One allocation or free. A tensor without bytes has no block."""
        if event.size_bytes is None:
            block = self._live.pop(event.key)
            if block is not None:
                self._release(block)
            return
        if event.key in self._live:
            raise KeyError(f"{event.key!r} is allocated already")
        self._live[event.key] = self._take(event.size_bytes) if event.size_bytes else None
        self._peaks = Peaks(
            max(self._peaks.requested_bytes, self.requested_bytes),
            max(self._peaks.allocated_bytes, self.allocated_bytes),
            max(self._peaks.reserved_bytes, self.reserved_bytes),
        )

    def address(self, key: Hashable) -> int | None:
        """Where an allocation is, None where it has no bytes. Raises KeyError."""
        block = self._live[key]
        return None if block is None else block.address

    def segments(self) -> tuple[Segment, ...]:
        """All segments with all their blocks, by address."""
        found: list[Segment] = []
        for first in self._first:
            blocks: list[Block] = []
            block: _Block | None = first
            while block is not None:
                blocks.append(Block(block.address, block.size_bytes, block.requested_bytes))
                block = block.after
            found.append(Segment(first.address, first.is_small, tuple(blocks)))
        return tuple(sorted(found, key=lambda segment: segment.address))

    # -- blocks -----------------------------------------------------------------------------

    def _take(self, requested_bytes: int) -> _Block:
        size = rounded(requested_bytes)
        is_small = size <= SMALL_BYTES
        block = self._best(size, is_small)
        if block is None:
            block = self._expand(size, is_small) if self.is_expandable else self._new(size)
        spare = block.size_bytes - size
        if spare >= ALIGNMENT_BYTES if is_small or self.is_expandable else spare > SMALL_BYTES:
            self._split(block, size)
        block.requested_bytes = requested_bytes
        self.requested_bytes += requested_bytes
        self.allocated_bytes += block.size_bytes
        return block

    def _best(self, size: int, is_small: bool) -> _Block | None:
        """The free block to use, taken out of its pool."""
        free = self._free[is_small]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        # What can expand counts as larger than all others.
        at_end = self._tail.get(is_small)
        if at_end is not None and free[place][1] == at_end.address and place + 1 < len(free):
            place += 1
        return self._at.pop(free.pop(place)[1])

    def _new(self, size: int) -> _Block:
        """A segment from the device, as one block that is in no pool."""
        is_small = size <= SMALL_BYTES
        segment = -(-size // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES
        if size < _OWN_SEGMENT_BYTES:
            segment = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        block = _Block(self._top, segment, is_small)
        self._top += segment
        self.reserved_bytes += segment
        self._first.append(block)
        return block

    def _expand(self, size: int, is_small: bool) -> _Block:
        """The free end of the pool's segment, made large enough, or a new end."""
        page = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        tail = self._tail.get(is_small)
        is_free = tail is not None and tail.requested_bytes is None
        lacking = size - tail.size_bytes if tail is not None and is_free else size
        grown = -(-lacking // page) * page
        self.reserved_bytes += grown
        if tail is not None and is_free:
            self._unlist(tail)
            tail.size_bytes += grown
            return tail
        # Far apart, so that neither segment ever reaches the other.
        start = (0 if is_small else 1 << 60) if tail is None else tail.address + tail.size_bytes
        block = _Block(start, grown, is_small, before=tail)
        if tail is None:
            self._first.append(block)
        else:
            tail.after = block
        self._tail[is_small] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(
            block.address + size,
            block.size_bytes - size,
            block.is_small,
            before=block,
            after=block.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size_bytes = rest, size
        if self._tail.get(block.is_small) is block:
            self._tail[block.is_small] = rest
        self._list(rest)

    def _release(self, block: _Block) -> None:
        assert block.requested_bytes is not None
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        block.requested_bytes = None
        if block.after is not None and block.after.requested_bytes is None:
            self._unlist(block.after)
            self._merge(block, block.after)
        if block.before is not None and block.before.requested_bytes is None:
            self._unlist(block.before)
            block = self._merge(block.before, block)
        self._list(block)

    def _merge(self, block: _Block, after: _Block) -> _Block:
        block.size_bytes += after.size_bytes
        block.after = after.after
        if block.after is not None:
            block.after.before = block
        if self._tail.get(block.is_small) is after:
            self._tail[block.is_small] = block
        return block

    def _list(self, block: _Block) -> None:
        insort(self._free[block.is_small], (block.size_bytes, block.address))
        self._at[block.address] = block

    def _unlist(self, block: _Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size_bytes, block.address))]
        del self._at[block.address]
