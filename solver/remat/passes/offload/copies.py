"""Times of copies between device and host in a schedule: two engines, one for each direction.

An engine runs its copies in the order in which the schedule starts them, while operations run. A
step waits where it needs the end of a copy: to free the tensor, or to read it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from remat.costs.devices import Link
from remat.graph import Graph

Direction = Literal["to_host", "to_device"]


@dataclass(frozen=True, slots=True)
class OffloadedValue:
    """A value that is on the host for a part of the step, with the four operations of its copies
    (see `remat.passes.offload.copies_in_graph`): indices of values and operations of a graph.

    `buffer` is the memory on the device that it is copied back to.
    """

    value: int
    buffer: int
    offload: int
    release: int
    reload: int
    arrive: int

    @property
    def operations(self) -> tuple[int, int, int, int]:
        """The four operations of its copies."""
        return self.offload, self.release, self.reload, self.arrive


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """One copy of a tensor, with its start and end in seconds from the start of the step."""

    tensor: str
    direction: Direction
    size_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The seconds in which an operation waits for a copy of a tensor."""

    operation: str
    tensor: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Simulated times of one step with copies. `host_bytes` has (seconds, bytes on the host) at
    each change: memory for a tensor is taken where the step starts its copy, and free when the
    copy back has ended."""

    step_s: float
    waits: tuple[Wait, ...]
    copies: tuple[TimedCopy, ...]
    host_bytes: tuple[tuple[float, int], ...]

    @property
    def waiting_s(self) -> float:
        """The seconds of `step_s` in which the step waits for copies."""
        return math.fsum(wait.end_s - wait.start_s for wait in self.waits)

    @property
    def copying_s(self) -> float:
        """The sum of the seconds of all copies. Operations run at the same time, except in the
        seconds of `waiting_s`."""
        return sum(copy.end_s - copy.start_s for copy in self.copies)

    @property
    def largest_host_bytes(self) -> int:
        """The largest number of bytes on the host at once."""
        return max((size for _, size in self.host_bytes), default=0)


def offloaded_values(graph: Graph) -> tuple[OffloadedValue, ...]:
    """Return the values of a graph that are offloaded, in the order of their copies to the host.

    A graph has no kinds of operations, so copies are found by their relations: `release` needs the
    copy that `offload` reads, and `arrive` renews the value from the result of `reload`.
    """
    offloaded: list[OffloadedValue] = []
    for release, operation in enumerate(graph.operations):
        if operation.same_copy_as < 0:
            continue
        for value in graph.shared_inputs(operation) & graph.renewal.keys():
            arrive = graph.renewal[value]
            if buffers := graph.operations[arrive].inputs:
                reload = graph.producer[buffers[0]]
                offload = operation.same_copy_as
                offloaded.append(
                    OffloadedValue(value, buffers[0], offload, release, reload, arrive)
                )
    return tuple(sorted(offloaded, key=lambda o: o.offload))


def count_without_offload_copies(graph: Graph) -> int:
    """Return the number of operations that neither start a copy nor wait for one."""
    return len(graph) - len({op for o in offloaded_values(graph) for op in o.operations})


def without_offload_copies(graph: Graph) -> Graph:
    """Return the graph of the step in which offloaded values stay on the device. Operations write
    over what came back from the host, but not over what the forward of such a step saves."""
    offloaded = offloaded_values(graph)
    removed = {op for o in offloaded for op in o.operations}
    operations = [o for op, o in enumerate(graph.operations) if op not in removed]
    produced = {v for o in operations for v in o.outputs}
    saved = {o.value for o in offloaded if not graph.operations[graph.producer[o.value]].backward}
    overwritable = produced - saved
    new_index = dict(zip(sorted(produced), range(len(produced)), strict=True))
    index = {op: i for i, op in enumerate(op for op in range(len(graph)) if op not in removed)}
    return replace(
        graph,
        operations=tuple(
            replace(
                operation,
                inputs=tuple(new_index[v] for v in operation.inputs if v in produced),
                outputs=tuple(new_index[v] for v in operation.outputs),
                overwrites=tuple(new_index[v] for v in operation.overwrites if v in overwritable),
                renews=tuple(new_index[v] for v in operation.renews),
                same_copy_as=index.get(operation.same_copy_as, -1),
            )
            for operation in operations
        ),
        values=tuple(value for v, value in enumerate(graph.values) if v in produced),
        results=frozenset(new_index[v] for v in graph.results if v in produced),
        boundary=None if graph.boundary is None else index.get(graph.boundary),
    )


def copy_times(
    graph: Graph,
    runs: Iterable[int],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
) -> CopyTimes:
    """Return the times of a step whose operations run in this order.

    The costs of `release` and `arrive` are replaced by the simulated waiting. `recomputed_s` are
    seconds of recomputation that are expected before operations, by their names.
    """
    rates: dict[Direction, float] = {
        "to_host": link.to_host_bytes_per_s,
        "to_device": link.to_device_bytes_per_s,
    }
    starts: dict[int, list[tuple[Direction, int]]] = defaultdict(list)
    awaited: dict[int, list[tuple[Direction, int]]] = defaultdict(list)
    for o in offloaded_values(graph):
        starts[o.offload].append(("to_host", o.value))
        starts[o.reload].append(("to_device", o.value))
        awaited[o.release].append(("to_host", o.value))
        awaited[o.arrive].append(("to_device", o.value))
    now_s = 0.0
    free_s: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
    end_s: dict[tuple[Direction, int], float] = {}
    waits: list[Wait] = []
    copies: list[TimedCopy] = []
    changes: list[tuple[float, int]] = [(0.0, 0)]
    for op in runs:
        operation = graph.operations[op]
        now_s += recomputed_s.get(operation.name, 0.0)
        for direction, value in starts.get(op, ()):
            name, size_bytes = graph.values[value].name, graph.values[value].size_bytes
            begin_s = max(now_s, free_s[direction])
            free_s[direction] = end_s[direction, value] = begin_s + size_bytes / rates[direction]
            copies.append(TimedCopy(name, direction, size_bytes, begin_s, free_s[direction]))
            if direction == "to_host":
                changes.append((now_s, size_bytes))
            else:
                changes.append((free_s[direction], -size_bytes))
        for copy in awaited.get(op, ()):
            until_s = max(now_s, end_s.get(copy, now_s))
            waits.append(Wait(operation.name, graph.values[copy[1]].name, now_s, until_s))
            now_s = until_s
        if op not in starts and op not in awaited:
            now_s += operation.cost_s
    changes.sort()
    sizes = accumulate(change for _, change in changes)
    host_bytes = tuple(zip((seconds for seconds, _ in changes), sizes, strict=True))
    return CopyTimes(now_s, tuple(waits), tuple(copies), host_bytes)
