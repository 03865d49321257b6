"""Offload values of a graph: what `copies_in_trace` does, where there is no trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from types import MappingProxyType
from typing import NamedTuple

from remat.costs.devices import Link
from remat.graph import Graph, Operation, Value
from remat.passes.offload.candidates import Candidate, idle_spans
from remat.passes.offload.places import (
    HANDLE_BYTES,
    CopyPlaces,
    HostStay,
    TimedOperation,
    copy_places,
)
from remat.simulate import baseline_of


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
    values: Collection[int],
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float],
    arrival_overwrites: Mapping[int, int] = MappingProxyType({}),
) -> OffloadedGraph:
    """Return the graph in which values are offloaded; the costs of its operations decide where
    copies start and end.

    `values` are those that can be offloaded, none of them results. `arrival_overwrites` has the
    value that an operation may write over if that comes back from the host. For the rest see
    `copy_places`. The graph has a boundary.
    """
    boundary = graph.boundary
    assert boundary is not None
    operations = [TimedOperation(o.name, o.cost_s) for o in graph.operations]
    candidates = _candidates(graph, values)
    places = [
        # what is gone before the backward starts is not saved for it
        place._replace(released=boundary - 1) if place.released == boundary else place
        for place in copy_places(operations, boundary + 1, candidates, stays, link, recomputed_s)
    ]
    return _insert(graph, places, arrival_overwrites)


def _candidates(graph: Graph, values: Collection[int]) -> Iterator[Candidate]:
    for v, idle in idle_spans(graph, sorted(values)).items():
        producer = graph.producer[v]
        result = graph.operations[producer].outputs.index(v)
        yield Candidate(graph.values[v].name, graph.values[v].size_bytes, producer, result, idle)


def _insert(
    graph: Graph, places: list[CopyPlaces], arrival_overwrites: Mapping[int, int]
) -> OffloadedGraph:
    """Return the graph with the operations of these copies. Copies that start at the same place do
    so in the reverse order of `places`, and end so."""
    before: dict[int, list[CopyOperation]] = defaultdict(list)
    after: dict[int, list[CopyOperation]] = defaultdict(list)
    for place in places:
        value = graph.operations[place.producer].outputs[place.result]
        after[place.producer].append(CopyOperation("offload", value))
        after[place.released].append(CopyOperation("release", value))
    for kind in ("reload", "arrive"):
        for place in reversed(places):
            value = graph.operations[place.producer].outputs[place.result]
            before[place.start if kind == "reload" else place.needed].append(
                CopyOperation(kind, value)
            )
    arriving = {graph.operations[p.producer].outputs[p.result] for p in places}
    overwrites = {op: v for op, v in arrival_overwrites.items() if v in arriving}
    insertion = _Insertion(graph, overwrites)
    for op in range(len(graph)):
        for copy in (*before[op], op, *after[op]):
            insertion.add(copy)
    return insertion.result()


class _Insertion:
    """The operations and values of a graph with copies, while it is built."""

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
            self.operations.append(self._copy(source))
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

    def _copy(self, copy: CopyOperation) -> Operation:
        """Return an operation that starts or awaits a copy. It takes no time of the device."""
        kind, value = copy
        producer = self.old.operations[self.old.producer[value]]
        handle = replace(self.old.values[value], size_bytes=HANDLE_BYTES)
        boundary = self.old.boundary
        operation = Operation(
            name=self._new_name(f"{kind}_{self.old.values[value].name}"),
            inputs=(value,),
            outputs=(),
            cost_s=0.0,
            backward=boundary in self.index,
            recomputable=False,
            module=producer.module,
        )
        if kind == "offload":
            return replace(operation, outputs=(self._add_value(copy, "sent", handle),))
        if kind == "release":
            offload = CopyOperation("offload", value)
            return replace(
                operation,
                inputs=(value, self.output[offload]),
                outputs=(self._add_value(copy, "stored", handle),),
                same_copy_as=self.index[offload],
            )
        if kind == "reload":
            stored = self.output[CopyOperation("release", value)]
            buffer = self._add_value(copy, "buffer", self.old.values[value])
            return replace(operation, inputs=(stored,), outputs=(buffer,))
        buffer = self.output[CopyOperation("reload", value)]
        return replace(
            operation, inputs=(buffer,), outputs=(value,), overwrites=(buffer,), renews=(value,)
        )

    def _add_value(self, copy: CopyOperation, suffix: str, like: Value) -> int:
        """Add the output of a copy, and return its index."""
        self.output[copy] = len(self.values)
        self.values.append(replace(like, name=f"{like.name}_{suffix}"))
        return self.output[copy]

    def _new_name(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in count(2))
        unique = next(n for n in chain([name], numbered) if n not in self.names)
        self.names.add(unique)
        return unique
