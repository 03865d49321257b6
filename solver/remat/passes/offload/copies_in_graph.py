"""Offload values of a graph: insert the operations that copy them to the host and back.

Each value gets four. `offload` starts the copy to the host behind its producer. `release` waits for
that copy: the memory is free from there on, and not before (`Operation.same_copy_as`). `reload`
allocates memory and starts the copy back. `arrive` waits for it before the first operation of the
backward that needs it. Memory thus depends on the order of operations only, never on how fast a
copy is: the solver and the simulator need no notion of copies.

What arrives is a new copy of the same value, as after a recomputation (`Operation.renews`):
operations that run later read it, recomputations among them.

Costs and bandwidth decide where copies are awaited: a `release` at the first point where its copy
is complete, a `reload` as late as it can start and still end in time, or right behind that point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count
from types import MappingProxyType
from typing import NamedTuple

from remat.costs.devices import Link
from remat.errors import RematError
from remat.graph import Graph, Operation, Value
from remat.passes.offload.candidates import IdleSpan, idle_spans
from remat.simulate import baseline_of

HANDLE_BYTES = 8
"""The bytes of a handle, the number of a slot on the host. It is in the memory of the CPU."""


@dataclass(frozen=True, slots=True)
class HostStay:
    """A value that is on the host for a part of the step, between operations of a graph.

    Its memory is free before the operation `freed_before`, and it starts to come back at the
    operation `reload_from` or later; None: the times of the copies decide. It is back before the
    operation `needed_before` of the backward, where recomputations may read it, or before the
    reader that ends its idle span if that is earlier. A value of the forward that the backward does
    not read requires `needed_before`.
    """

    value: int
    freed_before: int | None = None
    reload_from: int | None = None
    needed_before: int | None = None


class CopyOperation(NamedTuple):
    """An operation that starts or awaits a copy of a value, by its index in the graph without
    copies. `kind` is "offload", "release", "reload" or "arrive"."""

    kind: str
    value: int


@dataclass(frozen=True)
class OffloadedGraph:
    """A graph with offloaded values. `sources` has, for each of its operations, the index of that
    operation in the graph without copies, or the copy."""

    graph: Graph
    sources: tuple[int | CopyOperation, ...]


def offload_values(
    graph: Graph,
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
    arrival_overwrites: Mapping[int, int] = MappingProxyType({}),
) -> OffloadedGraph:
    """Return the graph in which values are offloaded.

    `recomputed_s` are seconds of recomputation that are expected before operations, by their names.
    `arrival_overwrites` has the value that an operation may write over if that comes back from the
    host. A value that is needed before its copy to the host has ended stays on the device. The
    graph has a boundary.

    Raises `RematError` for a value that is a result or read at once, or that nothing needs.
    """
    by_value = {stay.value: stay for stay in stays}
    spans = idle_spans(graph, by_value)
    needed = {v: _needed_before(graph, stay, spans.get(v)) for v, stay in by_value.items()}
    places = [*_copy_positions(graph, by_value, spans, needed, link, recomputed_s)]
    return _insert_copies(graph, places, arrival_overwrites)


def _needed_before(graph: Graph, stay: HostStay, span: IdleSpan | None) -> int:
    """Return the first operation that needs a value after its stay on the host. Raises `RematError`
    if the value cannot be offloaded, or if none does."""
    name = graph.values[stay.value].name
    if span is None or stay.value in graph.results:
        raise RematError(f"{name} cannot be offloaded: it is a result, or read at once")
    needs = [op for op in (stay.needed_before, span.next_reader) if op is not None]
    if not needs:
        raise RematError(
            f"{name} cannot be offloaded: no operation of the backward reads it, and nothing says "
            "before which operation a recomputation does; set needed_before"
        )
    return min(needs)


class _CopyPositions(NamedTuple):
    """Positions of a value's copies: its memory is free after the operation `released`; the
    copy back starts before `start`, and has ended before `needed`."""

    value: int
    released: int
    start: int
    needed: int


def _copy_positions(
    graph: Graph,
    stays: Mapping[int, HostStay],
    spans: Mapping[int, IdleSpan],
    needed: Mapping[int, int],
    link: Link,
    recomputed_s: Mapping[str, float],
) -> Iterator[_CopyPositions]:
    """Yield the positions of the copies of each value, in the reverse order in which the values are
    needed: `needed` has the operation before which each one is. Values whose copies take too long
    are left out: they stay on the device."""
    boundary = graph.boundary
    assert boundary is not None
    end_s = [*accumulate(o.cost_s + recomputed_s.get(o.name, 0.0) for o in graph.operations)]
    released: dict[int, int] = {}  # the operation after which the memory is free
    free_s = 0.0
    for value in sorted(stays, key=graph.producer.__getitem__):
        copied_s = max(free_s, end_s[graph.producer[value]])
        copied_s += graph.values[value].size_bytes / link.to_host_bytes_per_s
        operation = bisect_left(end_s, copied_s)
        if (freed_before := stays[value].freed_before) is not None:
            operation = min(operation, freed_before - 1)
        operation = max(operation, spans[value].last_use)
        if operation < needed[value] - 1:
            released[value] = operation
            free_s = copied_s
    next_start_s = end_s[-1]
    for value in sorted(stays, key=needed.__getitem__, reverse=True):
        end = needed[value]
        if value not in released or end <= boundary:
            continue
        needed_s = min(next_start_s, end_s[end - 1])
        start_s = needed_s - graph.values[value].size_bytes / link.to_device_bytes_per_s
        start = bisect_right(end_s, start_s)  # starts at or before start_s
        reload_from = stays[value].reload_from or 0
        start = max(start, released[value] + 1, boundary + 1, reload_from)
        start = min(start, end)
        if start > released[value]:
            next_start_s = start_s
            # what is freed before the backward starts is not saved for it
            last = released[value] - (released[value] == boundary)
            yield _CopyPositions(value, last, start, end)


def _insert_copies(
    graph: Graph, places: list[_CopyPositions], arrival_overwrites: Mapping[int, int]
) -> OffloadedGraph:
    """Return the graph with the operations of the copies at these positions. Copies back that start
    before the same operation do so in the reverse order of `places`. `arrival_overwrites` is as in
    `offload_values`."""
    before: dict[int, list[CopyOperation]] = defaultdict(list)
    after: dict[int, list[CopyOperation]] = defaultdict(list)
    for place in places:
        after[graph.producer[place.value]].append(CopyOperation("offload", place.value))
        after[place.released].append(CopyOperation("release", place.value))
    for place in reversed(places):
        before[place.start].append(CopyOperation("reload", place.value))
    for place in reversed(places):
        before[place.needed].append(CopyOperation("arrive", place.value))
    arriving = {place.value for place in places}
    overwrites = {op: v for op, v in arrival_overwrites.items() if v in arriving}
    insertion = _CopyInsertion(graph, overwrites)
    for op in range(len(graph)):
        for copy in (*before[op], op, *after[op]):
            insertion.add(copy)
    return insertion.result()


class _CopyInsertion:
    """Builds a graph with copies: its operations and values so far. `overwrites` has the value that
    an operation of the old graph writes over."""

    def __init__(self, graph: Graph, overwrites: Mapping[int, int]) -> None:
        self.old = graph
        self.overwrites = overwrites
        self.operations: list[Operation] = []
        self.values = list(graph.values)
        self.sources: list[int | CopyOperation] = []
        self.index: dict[int | CopyOperation, int] = {}
        """The new index of each operation of the old graph, and of each copy."""
        self.output: dict[CopyOperation, int] = {}
        self.names = {operation.name for operation in graph.operations}

    def add(self, source: int | CopyOperation) -> None:
        """Add an operation of the old graph, or of a copy."""
        self.index[source] = len(self.operations)
        self.sources.append(source)
        if isinstance(source, CopyOperation):
            self.operations.append(self._copy_operation(source))
            return
        operation = self.old.operations[source]
        if operation.same_copy_as >= 0:
            operation = replace(operation, same_copy_as=self.index[operation.same_copy_as])
        if source in self.overwrites:
            operation = replace(operation, overwrites=(self.overwrites[source],))
        self.operations.append(operation)

    def result(self) -> OffloadedGraph:
        """Return the graph. Its times and percentages are relative to the step without copies."""
        boundary = self.old.boundary
        graph = replace(
            self.old,
            operations=tuple(self.operations),
            values=tuple(self.values),
            boundary=None if boundary is None else self.index[boundary],
            unsplit=baseline_of(self.old),
        )
        return OffloadedGraph(graph, tuple(self.sources))

    def _copy_operation(self, copy: CopyOperation) -> Operation:
        """Return the operation that starts or awaits a copy, and add its output. It takes no time
        of the device."""
        kind, value = copy
        producer = self.old.operations[self.old.producer[value]]
        handle = replace(self.old.values[value], size_bytes=HANDLE_BYTES)
        boundary = self.old.boundary
        operation = Operation(
            name=self._new_operation_name(f"{kind}_{self.old.values[value].name}"),
            inputs=(value,),
            outputs=(),
            cost_s=0.0,
            backward=boundary in self.index,
            recomputable=False,
            module=producer.module,
        )
        if kind == "offload":
            return replace(operation, outputs=(self._add_copy_output(copy, "sent", handle),))
        if kind == "release":
            offload = CopyOperation("offload", value)
            return replace(
                operation,
                inputs=(value, self.output[offload]),
                outputs=(self._add_copy_output(copy, "stored", handle),),
                same_copy_as=self.index[offload],
            )
        if kind == "reload":
            stored = self.output[CopyOperation("release", value)]
            buffer = self._add_copy_output(copy, "buffer", self.old.values[value])
            return replace(operation, inputs=(stored,), outputs=(buffer,))
        buffer = self.output[CopyOperation("reload", value)]
        return replace(
            operation, inputs=(buffer,), outputs=(value,), overwrites=(buffer,), renews=(value,)
        )

    def _add_copy_output(self, copy: CopyOperation, suffix: str, like: Value) -> int:
        """Add the output of a copy, a value like `like` with a suffix, and return its index."""
        self.output[copy] = len(self.values)
        self.values.append(replace(like, name=f"{like.name}_{suffix}"))
        return self.output[copy]

    def _new_operation_name(self, name: str) -> str:
        """Return a name that no operation has: `name`, or that with a number."""
        numbered = (f"{name}_{number}" for number in count(2))
        unique = next(n for n in chain([name], numbered) if n not in self.names)
        self.names.add(unique)
        return unique
