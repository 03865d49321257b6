"""Times of copies between device and host in a schedule: two engines, one for each direction.

An engine runs its copies in the order in which the schedule starts them, while operations run. A
step waits where it needs the end of a copy: to free the tensor, or to read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from remat.costs.link import Link
from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.documents.trace import Trace

Direction = Literal["to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """One copy of a tensor, with its start and end in seconds from the start of the step."""

    tensor: str
    direction: Direction
    size_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Simulated times of one step with copies. `waits_s` are the seconds that operations wait for
    copies, by their names; `host_bytes` is the largest number of bytes on the host at once."""

    step_s: float
    waits_s: Mapping[str, float]
    copies: tuple[TimedCopy, ...]
    host_bytes: int

    @property
    def waiting_s(self) -> float:
        """The part of `step_s` in which the step waits for copies."""
        return math.fsum(self.waits_s.values())

    @property
    def copying_s(self) -> float:
        """The sum of the seconds of all copies; beyond `waiting_s`, they are hidden."""
        return sum(copy.end_s - copy.start_s for copy in self.copies)


def copy_times(trace: Trace, runs: Iterable[int], link: Link) -> CopyTimes:
    """Return the times of a step whose operations run in this order: indices of
    `trace.operations`."""
    now_s = 0.0
    waits_s: dict[str, float] = {}
    free_s: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
    rates = {"to_host": link.to_host_bytes_per_s, "to_device": link.to_device_bytes_per_s}
    end_s: dict[str, float] = {}  # by the handle or buffer of a copy
    tensor_of: dict[str, str] = {}  # by handle
    copies: list[TimedCopy] = []
    host_bytes = largest_host_bytes = 0

    def start(direction: Direction, key: str, tensor: str, size_bytes: int) -> None:
        begin_s = max(now_s, free_s[direction])
        end_s[key] = free_s[direction] = begin_s + size_bytes / rates[direction]
        copies.append(TimedCopy(tensor, direction, size_bytes, begin_s, end_s[key]))

    for run in runs:
        node = trace.operations[run]
        if node is None:
            continue
        if node.target == OFFLOAD_TARGET:
            handle, tensor = node.results[0].name, node.operand_names[0]
            size = trace.storage_bytes[trace.storage_of[tensor]]
            host_bytes += size
            largest_host_bytes = max(host_bytes, largest_host_bytes)
            tensor_of[handle] = tensor
            start("to_host", handle, tensor, size)
        elif node.target == RELOAD_TARGET:
            buffer = node.results[0]
            tensor_name = tensor_of[node.operand_names[0]]
            start("to_device", buffer.name, tensor_name, trace.storage_bytes[buffer.storage])
            host_bytes -= trace.storage_bytes[buffer.storage]
        elif node.target in (RELEASE_TARGET, ARRIVE_TARGET):
            waits_s[node.name] = max(0.0, end_s[node.operand_names[0]] - now_s)
            now_s += waits_s[node.name]
            if node.target == RELEASE_TARGET:
                tensor_of[node.results[0].name] = tensor_of[node.operand_names[0]]
        else:
            now_s += node.cost_s or 0.0
    return CopyTimes(now_s, waits_s, tuple(copies), largest_host_bytes)
