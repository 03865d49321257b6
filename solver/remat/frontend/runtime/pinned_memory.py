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


class _PinnedSpan(NamedTuple):
    """Some bytes of a pinned chunk: from `start` to `end`."""

    chunk: int
    start: int
    end: int


def _pin_host_memory(size_bytes: int) -> torch.Tensor:
    """Return a new tensor of bytes in pinned memory."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class PinnedChunks:
    """Pinned memory in chunks, of which spans are taken: the smallest free one that is large
    enough.

    Freed spans are not merged at once, so that a step that takes the same sizes again finds them.
    Free neighbors are merged only where no span is large enough. `pin` returns pinned memory of a
    size in bytes.
    """

    def __init__(self, pin: Callable[[int], torch.Tensor] = _pin_host_memory) -> None:
        self._pin_host_memory = pin
        self._chunks: list[torch.Tensor] = []
        self._free: list[_PinnedSpan] = []

    @property
    def pinned_bytes(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Pin as much memory as spans of these sizes need together, so that they can be taken
        later. Raises `RematError` if that fails; what was pinned until then is free."""
        remaining_bytes = sum(sizes_bytes := sorted(sizes_bytes, reverse=True))
        spans: list[_PinnedSpan] = []
        try:
            for size_bytes in sizes_bytes:
                spans.append(self.take(size_bytes, min(remaining_bytes, _MAX_CHUNK_BYTES)))
                remaining_bytes -= size_bytes
        finally:
            for span in spans:
                self.give(span)

    def take(self, size_bytes: int, expected_bytes: int = 0) -> _PinnedSpan:
        """Return a span of at least `size_bytes` that nothing else has. If no free one is large
        enough, pin a new chunk, with room for about `expected_bytes`. Raises `RematError` if no
        memory can be pinned."""
        size_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        span = self._smallest_free_span(size_bytes)
        if span is None:
            self._join_neighbors()
            span = self._smallest_free_span(size_bytes)
        if span is None:
            span = self._new_chunk(size_bytes, expected_bytes)
        else:
            self._free.remove(span)
        if span.end - span.start > size_bytes:
            self._free.append(span._replace(start=span.start + size_bytes))
        return span._replace(end=span.start + size_bytes)

    def give(self, span: _PinnedSpan) -> None:
        """Make a span that was taken free."""
        self._free.append(span)

    def _smallest_free_span(self, size_bytes: int) -> _PinnedSpan | None:
        """Return the smallest free span of at least this size; None if there is none."""
        spans = (r for r in self._free if r.end - r.start >= size_bytes)
        return min(spans, key=lambda r: (r.end - r.start, r), default=None)

    def _join_neighbors(self) -> None:
        """Merge free spans that are next to one another."""
        joined: list[_PinnedSpan] = []
        for span in sorted(self._free):
            if joined and joined[-1].chunk == span.chunk and joined[-1].end == span.start:
                joined[-1] = joined[-1]._replace(end=span.end)
            else:
                joined.append(span)
        self._free = joined

    def bytes_of(self, span: _PinnedSpan, size_bytes: int) -> torch.Tensor:
        """Return the first `size_bytes` of a span as a tensor that shares its memory."""
        return self._chunks[span.chunk][span.start : span.start + size_bytes]

    def _new_chunk(self, size_bytes: int, expected_bytes: int) -> _PinnedSpan:
        """Pin a new chunk, and return the span of all of it. Its size is a power of two, as torch's
        allocator would round it up: of at least `size_bytes`, 256 MiB, and `expected_bytes` rounded
        down. Raises `RematError`."""
        size_bytes = max(_CHUNK_BYTES, 1 << (size_bytes - 1).bit_length())
        size_bytes = max(size_bytes, 1 << (max(1, expected_bytes).bit_length() - 1))
        try:
            chunk = self._pin_host_memory(size_bytes)
        except RuntimeError as error:
            raise RematError(
                f"cannot pin {size_bytes:,} bytes of host memory for offloaded tensors, "
                f"{self.pinned_bytes:,} are pinned already: pass a smaller host_budget ({error})"
            ) from None
        self._chunks.append(chunk)
        return _PinnedSpan(len(self._chunks) - 1, 0, size_bytes)


class _Event(NamedTuple):
    """An event of a stream. One that was recorded while a CUDA graph was captured means nothing
    outside of that graph, and the reverse."""

    event: torch.cuda.Event | torch._C.Event
    is_captured: bool


def _record_event(stream: torch.cuda.Stream) -> _Event:
    """Return an event that marks the work in a stream so far."""
    return _Event(stream.record_event(), torch.cuda.is_current_stream_capturing())


def _wait_for_event(stream: torch.cuda.Stream, event: _Event | None) -> None:
    """Let a stream wait for an event. Does nothing for None, and for an event that was captured in
    a CUDA graph if the stream is not, or the reverse."""
    if event is not None and event.is_captured == torch.cuda.is_current_stream_capturing():
        stream.wait_event(event.event)  # type: ignore[arg-type]  # of CUDA, both


@dataclass
class _PinnedTensor:
    """A tensor in a span of pinned memory. `references` counts its handles; `source`, the tensor
    that is copied, is in memory until the copy to the host has ended, which `written` marks."""

    span: _PinnedSpan
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
        _wait_for_event(torch.cuda.current_stream(self._device), self._end)


class PinnedMemory:
    """Tensors of one GPU in pinned memory, each with a number. Numbers are negative, and say which
    GPU. `write`, `wait` and `read` only order the work of the current stream and the streams of
    copies."""

    def __init__(self, index: int) -> None:
        self._chunks = PinnedChunks()
        self._tensors: dict[int, _PinnedTensor] = {}
        self._numbers = count(-1 - index, -_MAX_DEVICES)
        self._lock = threading.RLock()
        self._last_read: _Event | None = None

    @property
    def used_bytes(self) -> int:
        """The bytes of all tensors in pinned memory, which cannot be reused."""
        with self._lock:
            return sum(placed.size_bytes for placed in self._tensors.values())

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned memory, used or not."""
        return self._chunks.pinned_bytes

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Pin memory for tensors of these sizes, before a step needs it. Raises `RematError`."""
        with self._lock:
            self._chunks.reserve(sizes_bytes)

    def write(self, tensor: torch.Tensor) -> int:
        """Start to copy a dense tensor to the host, and return its number, with one reference. The
        tensor must not be freed or changed before the current stream has waited."""
        stream = _copy_streams(tensor.device).to_host
        with self._lock:
            span = self._chunks.take(tensor.nbytes)
            target = self._chunks.bytes_of(span, tensor.nbytes)
        _wait_for_event(stream, _record_event(torch.cuda.current_stream(tensor.device)))
        _wait_for_event(stream, self._last_read)  # the span may have been read until then
        with torch.cuda.stream(stream):
            target.copy_(_flat_bytes(tensor), non_blocking=True)
        placed = _PinnedTensor(
            span, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
            tensor.nbytes, tensor, _record_event(stream),
        )  # fmt: skip
        with self._lock:
            number = next(self._numbers)
            self._tensors[number] = placed
        return number

    def wait(self, number: int) -> None:
        """Let the current stream wait until the tensor with this number is written."""
        placed = self._tensor_of(number)
        _wait_for_event(torch.cuda.current_stream(placed.device), placed.written)
        placed.source = None

    def read(self, number: int) -> tuple[torch.Tensor, StreamCopy]:
        """Start to copy a tensor of pinned memory into a new tensor of the same strides on the GPU.
        Return the new tensor and the copy."""
        placed = self._tensor_of(number)
        tensor = torch.empty_strided(
            placed.shape, placed.stride, dtype=placed.dtype, device=placed.device
        )
        stream = _copy_streams(placed.device).to_device
        # The tensor's memory belongs to the current stream, which may still use it.
        _wait_for_event(stream, _record_event(torch.cuda.current_stream(placed.device)))
        _wait_for_event(stream, placed.written)
        with torch.cuda.stream(stream):
            source = self._chunks.bytes_of(placed.span, placed.size_bytes)
            _flat_bytes(tensor).copy_(source, non_blocking=True)
        end = self._last_read = _record_event(stream)
        return tensor, StreamCopy(placed.device, end)

    def add_reference(self, number: int) -> None:
        """Count one more handle of a tensor."""
        with self._lock:
            self._tensor_of(number).references += 1

    def drop_reference(self, number: int) -> None:
        """Count one handle less of a tensor. Without any, its span is free: later copies into it
        wait for copies that read it."""
        with self._lock:
            placed = self._tensors[number]
            placed.references -= 1
            if not placed.references:
                del self._tensors[number]
                self._chunks.give(placed.span)

    def _tensor_of(self, number: int) -> _PinnedTensor:
        """Return the tensor with this number. Raises `RematError` if its memory was freed."""
        if number not in self._tensors:
            raise RematError(
                "an offloaded tensor is no longer in pinned memory: its handle was copied, by "
                "saved_tensors_hooks or in another process, and the original was freed; run the "
                'step outside of these hooks, or plan it with offload="off"'
            )
        return self._tensors[number]


class _Streams(NamedTuple):
    """The streams of a device's copies in each direction."""

    to_host: torch.cuda.Stream
    to_device: torch.cuda.Stream


@cache
def _copy_streams(device: torch.device) -> _Streams:
    """Return the streams of a device's copies, created at the first call."""
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as a flat tensor of its bytes, which shares its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pinned_memory(device: torch.device) -> PinnedMemory:
    """Return this process's pinned memory for a GPU, which is created at the first call."""
    return _pinned_memory_of_gpu(
        torch.cuda.current_device() if device.index is None else device.index
    )


def pinned_memory_of(number: int) -> PinnedMemory:
    """Return the pinned memory that has the tensor with this number."""
    return _pinned_memory_of_gpu((-1 - number) % _MAX_DEVICES)


@cache
def _pinned_memory_of_gpu(index: int) -> PinnedMemory:
    """Return the pinned memory for the GPU with this index."""
    return PinnedMemory(index)
