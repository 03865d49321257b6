"""`PinnedMemory`: tensors of a GPU in pinned host memory, copied while other operations run.

Each device has a stream for each direction. The CPU never waits: streams wait for events. Pinned
memory is allocated in large chunks that are reused for the rest of the process, since pinning takes
milliseconds and is rounded up to powers of two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import NamedTuple

import torch

from remat.errors import RematError

_CHUNK_BYTES = 256 << 20
_MAX_CHUNK_BYTES = 4 << 30
"""The largest chunk for several tensors: a larger one may be refused where smaller ones are not."""

_MAX_DEVICES = 64
_ALIGNMENT_BYTES = 512


class _Region(NamedTuple):
    """Bytes of a chunk."""

    chunk: int
    start: int
    end: int


def _pin(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class PinnedChunks:
    """Regions of pinned chunks: the smallest free one that is large enough is taken.

    Freed regions are not merged at once, so that a step that takes the same sizes again finds them.
    Free neighbors are merged only where no region is large enough. `pin` returns pinned memory of a
    size in bytes.
    """

    def __init__(self, pin: Callable[[int], torch.Tensor] = _pin) -> None:
        self._pin = pin
        self._chunks: list[torch.Tensor] = []
        self._free: list[_Region] = []

    @property
    def pinned_bytes(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Pin as much as regions of these sizes need together. Raises `RematError` if that
        fails."""
        remaining_bytes = sum(sizes_bytes := sorted(sizes_bytes, reverse=True))
        regions: list[_Region] = []
        for size_bytes in sizes_bytes:
            regions.append(self.take(size_bytes, min(remaining_bytes, _MAX_CHUNK_BYTES)))
            remaining_bytes -= size_bytes
        for region in regions:
            self.give(region)

    def take(self, size_bytes: int, expected_bytes: int = 0) -> _Region:
        """Return a region that nothing else has. A new chunk has room for about `expected_bytes`.
        Raises `RematError` if no memory can be pinned."""
        size_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        region = self._smallest(size_bytes)
        if region is None:
            self._join_neighbors()
            region = self._smallest(size_bytes)
        if region is None:
            region = self._new_chunk(size_bytes, expected_bytes)
        else:
            self._free.remove(region)
        if region.end - region.start > size_bytes:
            self._free.append(region._replace(start=region.start + size_bytes))
        return region._replace(end=region.start + size_bytes)

    def give(self, region: _Region) -> None:
        """Make a region free."""
        self._free.append(region)

    def _smallest(self, size_bytes: int) -> _Region | None:
        """Return the smallest free region of at least this size; None if there is none."""
        regions = (r for r in self._free if r.end - r.start >= size_bytes)
        return min(regions, key=lambda r: (r.end - r.start, r), default=None)

    def _join_neighbors(self) -> None:
        """Make one region of free regions that are next to one another."""
        joined: list[_Region] = []
        for region in sorted(self._free):
            if joined and joined[-1].chunk == region.chunk and joined[-1].end == region.start:
                joined[-1] = joined[-1]._replace(end=region.end)
            else:
                joined.append(region)
        self._free = joined

    def bytes_of(self, region: _Region, size_bytes: int) -> torch.Tensor:
        """Return the first bytes of a region."""
        return self._chunks[region.chunk][region.start : region.start + size_bytes]

    def _new_chunk(self, size_bytes: int, expected_bytes: int) -> _Region:
        """Pin a power of two: what torch's allocator would round the size up to."""
        size_bytes = max(_CHUNK_BYTES, 1 << (size_bytes - 1).bit_length())
        size_bytes = max(size_bytes, 1 << (max(1, expected_bytes).bit_length() - 1))
        try:
            chunk = self._pin(size_bytes)
        except RuntimeError as error:
            raise RematError(
                f"cannot pin {size_bytes:,} bytes of host memory for offloaded tensors, "
                f"{self.pinned_bytes:,} are pinned already: pass a smaller host_budget ({error})"
            ) from None
        self._chunks.append(chunk)
        return _Region(len(self._chunks) - 1, 0, size_bytes)


class _Event(NamedTuple):
    """An event of a stream. One that was recorded while a CUDA graph was captured means nothing
    outside of that graph, and the reverse."""

    event: torch.cuda.Event | torch._C.Event
    is_captured: bool


def _record(stream: torch.cuda.Stream) -> _Event:
    return _Event(stream.record_event(), torch.cuda.is_current_stream_capturing())


def _wait(stream: torch.cuda.Stream, event: _Event | None) -> None:
    if event is not None and event.is_captured == torch.cuda.is_current_stream_capturing():
        stream.wait_event(event.event)  # type: ignore[arg-type]  # of CUDA, both


@dataclass
class _Slot:
    """A region with the bytes of a tensor. `references` counts its handles; `source` is in memory
    until the copy to the host has ended."""

    region: _Region
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size_bytes: int
    source: torch.Tensor | None
    written: _Event
    references: int = 1


class StreamCopy:
    """A copy into a tensor on a stream."""

    def __init__(self, device: torch.device, end: _Event) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        """Let the current stream wait until the copy has ended."""
        _wait(torch.cuda.current_stream(self._device), self._end)


class PinnedMemory:
    """Slots of pinned memory for one GPU. Their numbers are negative, and say which GPU. `write`,
    `wait` and `read` only order the work of the current stream and the streams of copies."""

    def __init__(self, index: int) -> None:
        self._chunks = PinnedChunks()
        self._slots: dict[int, _Slot] = {}
        self._numbers = count(-1 - index, -_MAX_DEVICES)
        self._lock = threading.RLock()
        self._last_read: _Event | None = None

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots that cannot be reused."""
        with self._lock:
            return sum(slot.size_bytes for slot in self._slots.values())

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned memory, used or not."""
        return self._chunks.pinned_bytes

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Pin memory for slots of these sizes, before a step needs it."""
        with self._lock:
            self._chunks.reserve(sizes_bytes)

    def write(self, tensor: torch.Tensor) -> int:
        """Start to copy a dense tensor, and return the number of its slot, with one reference. The
        tensor must not be freed or changed before the current stream has waited."""
        stream = _streams(tensor.device).to_host
        with self._lock:
            region = self._chunks.take(tensor.nbytes)
            target = self._chunks.bytes_of(region, tensor.nbytes)
        _wait(stream, _record(torch.cuda.current_stream(tensor.device)))
        _wait(stream, self._last_read)  # the region may have been read until then
        with torch.cuda.stream(stream):
            target.copy_(_flat_bytes(tensor), non_blocking=True)
        slot = _Slot(
            region, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
            tensor.nbytes, tensor, _record(stream),
        )  # fmt: skip
        with self._lock:
            number = next(self._numbers)
            self._slots[number] = slot
        return number

    def wait(self, number: int) -> None:
        """Let the current stream wait until a slot is written."""
        slot = self._slot(number)
        _wait(torch.cuda.current_stream(slot.device), slot.written)
        slot.source = None

    def read(self, number: int) -> tuple[torch.Tensor, StreamCopy]:
        """Start to copy a slot into a new tensor of the same strides."""
        slot = self._slot(number)
        tensor = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=slot.device)
        stream = _streams(slot.device).to_device
        # The tensor's memory belongs to the current stream, which may still use it.
        _wait(stream, _record(torch.cuda.current_stream(slot.device)))
        _wait(stream, slot.written)
        with torch.cuda.stream(stream):
            source = self._chunks.bytes_of(slot.region, slot.size_bytes)
            _flat_bytes(tensor).copy_(source, non_blocking=True)
        end = self._last_read = _record(stream)
        return tensor, StreamCopy(slot.device, end)

    def add_reference(self, number: int) -> None:
        """Count one more handle of a slot."""
        with self._lock:
            self._slot(number).references += 1

    def drop_reference(self, number: int) -> None:
        """Count one handle less. Without any, the slot is free: later copies into it wait for those
        that read it."""
        with self._lock:
            slot = self._slots[number]
            slot.references -= 1
            if not slot.references:
                del self._slots[number]
                self._chunks.give(slot.region)

    def _slot(self, number: int) -> _Slot:
        if number not in self._slots:
            raise RematError(
                "an offloaded tensor is no longer in pinned memory: its handle was copied, by "
                "saved_tensors_hooks or in another process, and the original was freed; run the "
                'step outside of these hooks, or plan it with offload="off"'
            )
        return self._slots[number]


class _Streams(NamedTuple):
    to_host: torch.cuda.Stream
    to_device: torch.cuda.Stream


@cache
def _streams(device: torch.device) -> _Streams:
    """Return the streams of a device's copies."""
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pinned_memory(device: torch.device) -> PinnedMemory:
    """Return this process's pinned memory for a GPU, which is created at the first call."""
    return _pinned_memory(torch.cuda.current_device() if device.index is None else device.index)


def pinned_memory_of(number: int) -> PinnedMemory:
    """Return the pinned memory that has a slot."""
    return _pinned_memory((-1 - number) % _MAX_DEVICES)


@cache
def _pinned_memory(index: int) -> PinnedMemory:
    return PinnedMemory(index)
