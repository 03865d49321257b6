"""`Schedule`: the executed sequence, and nothing else.

When values are freed follows from the sequence: a run of an operation reads the latest copy of
each input, and a copy dies after its last reader (results never die). Any schedule that a solver
expresses with explicit frees has a sequence of this kind with the same cost and no larger peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from remat.errors import GraphError
from remat.graph import Graph


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operation indices in the order in which they run; one that returns is a recomputation."""

    runs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.runs)

    @classmethod
    def keep_all(cls, graph: Graph) -> Schedule:
        """Every operation once, in the graph's order."""
        return cls(tuple(range(len(graph.operations))))

    @classmethod
    def of(cls, runs: Iterable[int]) -> Schedule:
        """From any iterable of operation indices."""
        return cls(tuple(runs))

    def check(self, graph: Graph) -> None:
        """Raise `GraphError` unless every operation runs, after its inputs, and those that may
        run only once do."""
        count = len(graph.operations)
        seen = [0] * count
        for position, op in enumerate(self.runs):
            if not 0 <= op < count:
                raise GraphError(f"run {position} names operation {op}; the graph has {count}")
            operation = graph.operations[op]
            if seen[op] and not operation.recomputable:
                raise GraphError(f"run {position}: {operation.name} may run only once")
            for v in operation.inputs:
                if not seen[graph.producer[v]]:
                    raise GraphError(
                        f"run {position}: {operation.name} reads {graph.values[v].name} "
                        "before it was ever produced"
                    )
            seen[op] += 1
        for op, times in enumerate(seen):
            if not times:
                raise GraphError(f"{graph.operations[op].name} never runs")

    def keeps_order(self) -> bool:
        """Whether operations run for the first time in the graph's order."""
        first = list(dict.fromkeys(self.runs))
        return first == sorted(first)

    def recomputed(self, graph: Graph) -> dict[int, int]:
        """How many extra times each operation runs, for those that run more than once."""
        times = Counter(self.runs)
        return {op: times[op] - 1 for op in range(len(graph)) if times[op] > 1}


def missing_operations(graph: Graph, values: Iterable[int], there: Container[int]) -> list[int]:
    """The operations to run, in the graph's order, so that `values` are in memory where those of
    `there` are."""
    found: set[int] = set()
    wanted = [v for v in values if v not in there]
    while wanted:
        op = graph.producer[wanted.pop()]
        if op not in found:
            found.add(op)
            wanted += [v for v in graph.operations[op].inputs if v not in there]
    return sorted(found)
