"""Findings about memory that no tensor uses: fragments, blocks of other streams and pools, and the
memory of other processes.

That expandable segments would have served a request is proved by a replay of the recording
(`remat.allocator.replay`) in which they have no more than the device had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from remat.allocator.replay import AllocationEvent, replay_events, round_size
from remat.limits.units import format_bytes
from remat.snapshots.findings import Finding, Kind, Place
from remat.snapshots.model import DEFAULT_POOL, NEVER, DeviceSegment, Pool
from remat.snapshots.recording import Recording

_MAX_REPLAYED = 1_000_000
_CONTEXT_BYTES = 600 << 20
"""About what a CUDA context and its libraries take outside of the allocator."""


class FreeRange(NamedTuple):
    """Consecutive free bytes of a segment."""

    size_bytes: int
    stream: int
    pool: Pool


class Reserved(NamedTuple):
    """The reserved bytes at the moment, and the free ranges among them."""

    size_bytes: int
    free: tuple[FreeRange, ...]
    waiting_bytes: int

    @property
    def free_bytes(self) -> int:
        return sum(free.size_bytes for free in self.free)


def reserved_memory(recording: Recording) -> Reserved:
    """Return the segments of the moment without the blocks that were live then."""
    allocations = recording.memory.allocations
    live = recording.live
    order = np.argsort(allocations.addresses[live])
    addresses = allocations.addresses[live][order]
    ends = addresses + allocations.sizes[live][order]
    free: list[FreeRange] = []
    size_bytes = 0
    for segment in _segments_at(recording):
        size_bytes += segment.size_bytes
        position, end = segment.address, segment.address + segment.size_bytes
        rows = range(*np.searchsorted(addresses, (position, end)))
        for row in rows:
            if addresses[row] > position:
                free.append(FreeRange(int(addresses[row] - position), segment.stream, segment.pool))
            position = segment.address + round_size(int(ends[row]) - segment.address)
        if end > position:
            free.append(FreeRange(int(end - position), segment.stream, segment.pool))
    waiting = sum(
        block.size_bytes
        for segment in recording.memory.segments
        for block in segment.blocks
        if block.state not in ("active_allocated", "inactive")
    )
    return Reserved(size_bytes, tuple(free), waiting)


def _segments_at(recording: Recording) -> Iterator[DeviceSegment]:
    moment = recording.moment
    for segment in recording.memory.segments:
        if segment.start < moment <= segment.end or (
            segment.start < moment and segment.end == NEVER
        ):
            yield segment


def allocator_findings(
    recording: Recording, reserved: Reserved, total_bytes: int | None, other: Finding | None
) -> list[Finding]:
    """Return the findings about a failed request; none without one. `total_bytes` is the memory of
    the device, if that is known."""
    request = recording.request
    if request is None:
        return []
    size = request.size_bytes
    findings: list[Finding] = [] if other is None else [other]
    if other is None and total_bytes:
        others = total_bytes - request.device_free_bytes - reserved.size_bytes - _CONTEXT_BYTES
        findings += other_process(others, total_bytes, "")
    mine = [r for r in reserved.free if r.stream == request.stream and r.pool == DEFAULT_POOL]
    large = [r.size_bytes for r in mine if r.size_bytes < size]
    place = recording.places[request.stack]
    fragments_bytes = sum(large)
    if fragments_bytes + request.device_free_bytes >= size and fragments_bytes > 0:
        fits = _fits_when_expandable(recording, reserved.size_bytes + request.device_free_bytes)
        text = (
            f"{format_bytes(fragments_bytes)} of the reserved memory are free, in "
            f"{len(large):,} ranges of at most {format_bytes(max(large))}: none has "
            f"{format_bytes(size)}"
        )
        remedy = (
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True: replayed with it, the request fits"
            if fits
            else "Request fewer different sizes: pad batches to a few lengths. Expandable segments "
            "would not have served this request"
        )
        findings.append(
            Finding(
                Kind.FRAGMENTS, fragments_bytes, place, text, remedy,
                releases_bytes=fragments_bytes if fits else 0,
            )
        )  # fmt: skip
    other_streams = sum(r.size_bytes for r in reserved.free if r.stream != request.stream)
    if other_streams >= size or other_streams >= 0.2 * reserved.size_bytes:
        findings.append(
            Finding(
                Kind.OTHER_STREAM,
                other_streams,
                place,
                f"{format_bytes(other_streams)} are free in segments of other streams, which only "
                "those streams can use",
                "Allocate these tensors on the stream that most of the step uses, and call "
                "record_stream for the other one: then all share the free blocks",
                releases_bytes=other_streams,
            )
        )
    if reserved.waiting_bytes >= max(size // 2, reserved.size_bytes // 10):
        findings.append(
            Finding(
                Kind.WAITING_BLOCKS,
                reserved.waiting_bytes,
                place,
                f"{format_bytes(reserved.waiting_bytes)} are freed, and wait for a stream that "
                "still uses them (record_stream)",
                "Synchronize the streams more often (stream.wait_stream), so that blocks are "
                "reused, or keep the tensors until the other stream has finished",
                releases_bytes=reserved.waiting_bytes,
            )
        )
    pools = sum(r.size_bytes for r in reserved.free if r.pool != DEFAULT_POOL)
    if pools >= size or pools >= 0.1 * reserved.size_bytes:
        findings.append(
            Finding(
                Kind.OTHER_POOL,
                pools,
                place,
                f"{format_bytes(pools)} are free in private pools (a MemPool, CUDA graphs), which "
                "other code cannot use",
                "Delete the graphs and pools that are no longer used, or let graphs share a pool",
                releases_bytes=pools,
            )
        )
    return findings


def other_process(size_bytes: int, total_bytes: int, who: str) -> list[Finding]:
    """Return the finding about memory of other processes, if that is a tenth of the device's."""
    if size_bytes < 0.1 * total_bytes:
        return []
    return [
        Finding(
            Kind.OTHER_PROCESS,
            size_bytes,
            Place(),
            f"{who or 'Other processes'} use {format_bytes(size_bytes)} of the device's "
            f"{format_bytes(total_bytes)}",
            "End the other process (nvidia-smi shows it; often an earlier run or a notebook), or "
            "use another GPU",
            releases_bytes=size_bytes,
        )
    ]


def _fits_when_expandable(recording: Recording, limit_bytes: int) -> bool:
    """True if expandable segments serve all requests up to the failed one within a limit."""
    if any(s.is_expandable for s in recording.memory.segments):
        return False
    allocations = recording.memory.allocations
    if len(allocations.sizes) > _MAX_REPLAYED:
        return False
    return replay_events(_events(recording), is_expandable=True).reserved_bytes <= limit_bytes


def _events(recording: Recording) -> Iterator[AllocationEvent]:
    """Yield the recorded allocations and frees of the requesting stream up to the failed request,
    and that request."""
    request = recording.request
    assert request is not None
    allocations, moment = recording.memory.allocations, recording.moment
    rows = np.flatnonzero(allocations.starts < moment)
    ended = rows[allocations.ends[rows] < moment]
    times = np.concatenate([allocations.starts[rows], allocations.ends[ended]])
    keys = np.concatenate([rows, ended])
    is_end = np.arange(len(times)) >= len(rows)
    sizes = allocations.sizes
    for index in np.lexsort((~is_end, times)):
        row = int(keys[index])
        yield AllocationEvent(row, None if is_end[index] else int(sizes[row]))
    yield AllocationEvent("request", request.size_bytes)
