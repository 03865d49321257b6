"""Times of copies between device and host in a schedule: two engines, one for each direction.

An engine runs its copies in the order in which the schedule starts them, while operations run. A
step waits where it needs the end of a copy: to free the tensor, or to read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from remat.costs.link import Link
from remat.graph import Graph

Direction = Literal["to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class OffloadedValue:
    """A value that is on the host for a part of the step, with the four operations of its copies
    (see `remat.passes.offload.copies_in_trace`): indices of values and operations of a graph.

    `buffer` is the memory on the device that it is copied back to.
    """

    value: int
    buffer: int
    offload: int
    release: int
    reload: int
    arrive: int


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
    """Simulated times of one step with copies.

    `waits_s` are the seconds that operations wait for copies, by their names. `host_bytes` are the
    bytes on the host from a time on, in order: (seconds, bytes) at each change.
    """

    step_s: float
    waits_s: Mapping[str, float]
    copies: tuple[TimedCopy, ...]
    host_bytes: tuple[tuple[float, int], ...]

    @property
    def waiting_s(self) -> float:
        """The part of `step_s` in which the step waits for copies."""
        return math.fsum(self.waits_s.values())

    @property
    def copying_s(self) -> float:
        """The sum of the seconds of all copies; beyond `waiting_s`, they are hidden."""
        return sum(copy.end_s - copy.start_s for copy in self.copies)

    @property
    def largest_host_bytes(self) -> int:
        """The largest number of bytes on the host at once."""
        return max((size for _, size in self.host_bytes), default=0)


def offloaded_values(graph: Graph) -> tuple[OffloadedValue, ...]:
    """Return the values of a graph that are offloaded, in the order of their copies to the host."""
    offloaded: list[OffloadedValue] = []
    for release, operation in enumerate(graph.operations):
        if operation.same_copy_as < 0:
            continue
        for value in graph.shared_inputs(operation) & set(graph.renewal):
            arrive = graph.renewal[value]
            for buffer in graph.operations[arrive].inputs[:1]:
                reload = graph.producer[buffer]
                offload = operation.same_copy_as
                offloaded.append(OffloadedValue(value, buffer, offload, release, reload, arrive))
    return tuple(sorted(offloaded, key=lambda o: o.offload))


def copy_times(
    graph: Graph,
    runs: Iterable[int],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
) -> CopyTimes:
    """Return the times of a step whose operations run in this order.

    The costs of operations that wait for copies are replaced by what they wait. `recomputed_s` are
    seconds that operations take longer, by their names, for recomputations that `runs` lacks.
    """
    offloaded = offloaded_values(graph)
    starts_to_host = {o.offload: o for o in offloaded}
    starts_to_device = {o.reload: o for o in offloaded}
    awaited = {o.release: ("to_host", o.value) for o in offloaded}
    awaited |= {o.arrive: ("to_device", o.value) for o in offloaded}
    rates: dict[Direction, float] = {
        "to_host": link.to_host_bytes_per_s,
        "to_device": link.to_device_bytes_per_s,
    }
    now_s = 0.0
    free_s: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
    end_s: dict[tuple[str, int], float] = {}
    waits_s: dict[str, float] = {}
    copies: list[TimedCopy] = []
    host_bytes = [(0.0, 0)]

    def start(direction: Direction, value: int) -> None:
        size_bytes = graph.values[value].size_bytes
        begin_s = max(now_s, free_s[direction])
        free_s[direction] = begin_s + size_bytes / rates[direction]
        end_s[direction, value] = free_s[direction]
        name = graph.values[value].name
        copies.append(TimedCopy(name, direction, size_bytes, begin_s, free_s[direction]))
        change_bytes = size_bytes if direction == "to_host" else -size_bytes
        host_bytes.append((now_s, host_bytes[-1][1] + change_bytes))

    for op in runs:
        operation = graph.operations[op]
        if op in starts_to_host:
            start("to_host", starts_to_host[op].value)
        elif op in starts_to_device:
            start("to_device", starts_to_device[op].value)
        elif op in awaited:
            waits_s[operation.name] = max(0.0, end_s[awaited[op]] - now_s)
            now_s += waits_s[operation.name]
        else:
            now_s += operation.cost_s
        now_s += recomputed_s.get(operation.name, 0.0)
    return CopyTimes(now_s, waits_s, tuple(copies), tuple(host_bytes))
