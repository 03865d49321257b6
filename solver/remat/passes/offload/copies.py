"""Times of copies between device and host in a schedule: two engines, one for each direction.

An engine runs its copies in the order in which the schedule starts them, while operations run. A
step waits where it needs the end of a copy: to free the tensor, or to read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from remat.costs.link import Link
from remat.documents.arguments import Argument, Ref
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
    """Simulated times of one step with copies. `waiting_s` is the part of `step_s` in which it
    waits for copies, `host_bytes` the largest number of bytes on the host at once."""

    step_s: float
    waiting_s: float
    copies: tuple[TimedCopy, ...]
    host_bytes: int

    @property
    def copying_s(self) -> float:
        """The sum of the seconds of all copies; beyond `waiting_s`, they are hidden."""
        return sum(copy.end_s - copy.start_s for copy in self.copies)


def copy_times(trace: Trace, runs: Iterable[int], link: Link) -> CopyTimes:
    """Return the times of a step whose operations run in this order: indices of
    `trace.operations`."""
    now_s = waiting_s = 0.0
    free_s: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
    rates = {"to_host": link.to_host_bytes_per_s, "to_device": link.to_device_bytes_per_s}
    end_s: dict[str, float] = {}  # by the handle or buffer of a copy
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
            tensor = referenced(node.args[0])
            size = trace.storage_bytes[trace.storage_of[tensor]]
            host_bytes += size
            largest_host_bytes = max(host_bytes, largest_host_bytes)
            start("to_host", node.results[0].name, tensor, size)
        elif node.target == RELOAD_TARGET:
            buffer = node.results[0]
            start("to_device", buffer.name, buffer.name, trace.storage_bytes[buffer.storage])
            host_bytes -= trace.storage_bytes[buffer.storage]
        elif node.target in (RELEASE_TARGET, ARRIVE_TARGET):
            wait_s = max(0.0, end_s[referenced(node.args[0])] - now_s)
            waiting_s += wait_s
            now_s += wait_s
        else:
            now_s += node.cost_s or 0.0
    return CopyTimes(now_s, waiting_s, tuple(copies), largest_host_bytes)


def referenced(argument: Argument) -> str:
    """Return the name of the tensor that an argument is."""
    assert isinstance(argument, Ref)
    return argument.name
