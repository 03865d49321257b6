"""A memory snapshot as data: the allocations of a device with their lifetimes, and its segments.

Times are indices of the recording's events. The recording may have started late, or lost its oldest
events (a ring buffer): allocations from before start at -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEVER = np.iinfo(np.int64).max
"""The end of an allocation that is live when the snapshot is taken."""

Integers = NDArray[np.int64]
Pool = tuple[int, int]
DEFAULT_POOL: Pool = (0, 0)


class Frame(NamedTuple):
    """A frame of a stack: file, line, and name of the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """Where an allocation was made: the frames, innermost first, and the module that `remat.watch`
    recorded, "" if none."""

    frames: tuple[Frame, ...] = ()
    module: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Allocations:
    """Columns of the same length. `sizes` are bytes that were requested; an allocation is live from
    its start to before its end. `stacks` are indices of `Snapshot.stacks`; the stack of an
    allocation from before the recording is known if it is still live."""

    addresses: Integers
    sizes: Integers
    starts: Integers
    ends: Integers
    stacks: Integers
    streams: Integers

    def live_at(self, event: int) -> NDArray[np.bool_]:
        """Return a mask of the allocations that are live just before an event."""
        return (self.starts < event) & (self.ends >= event)


class SegmentBlock(NamedTuple):
    """A block of a segment; `state` is "active_allocated", "inactive", or another name of torch for
    a block whose free waits for a stream."""

    address: int
    size_bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """Memory that the allocator reserved from the device. `start` and `end` are events."""

    address: int
    size_bytes: int
    stream: int = 0
    pool: Pool = DEFAULT_POOL
    is_expandable: bool = False
    blocks: tuple[SegmentBlock, ...] = ()
    start: int = -1
    end: int = NEVER


class FailedRequest(NamedTuple):
    """A request that failed: its event, its bytes, the bytes that the device had free, and its
    stack and stream."""

    event: int
    size_bytes: int
    device_free_bytes: int
    stack: int
    stream: int


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """The recording of one device. `segments` includes those that were returned to the device
    during the recording. `is_cut` is True if the recording misses allocations before its start."""

    device: int
    event_count: int
    allocations: Allocations
    segments: tuple[DeviceSegment, ...]
    failed: tuple[FailedRequest, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A memory snapshot: its devices, and the stacks of their allocations. Stack 0 has no frames.
    `names` are those of tensors by address, if the recording has them. `has_frames` is False if no
    allocation has a stack, and `is_cpu` True for tensors on the CPU."""

    devices: tuple[DeviceMemory, ...]
    stacks: tuple[Stack, ...] = (Stack(),)
    names: Mapping[int, str] = field(default_factory=dict)
    is_cpu: bool = False

    @property
    def has_frames(self) -> bool:
        return len(self.stacks) > 1
