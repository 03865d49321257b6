"""`Schedule`: the sequence of operations that runs.

When values are freed follows from the sequence: a run of an operation reads the latest copy of each
input, and a copy is freed after its last reader (results never are). Any schedule that a solver
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
    """Operation indices in the order in which they run; a repeated index is a recomputation."""

    runs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.runs)

    @classmethod
    def keep_all(cls, graph: Graph) -> Schedule:
        """Return the schedule of every operation once, in the graph's order."""
        return cls(tuple(range(len(graph.operations))))

    @classmethod
    def of(cls, runs: Iterable[int]) -> Schedule:
        """Return a schedule from any iterable of operation indices."""
        return cls(tuple(runs))

    def check(self, graph: Graph) -> None:
        """Raise `GraphError` unless every operation runs, after its inputs, only recomputable
        operations run several times, order-sensitive ones first run in the graph's order, and no
        input that two operations must share (see `Operation.same_copy_as`) is recomputed between
        them."""
        count = len(graph.operations)
        seen = [0] * count
        latest_run = [-1] * count
        last_sensitive = -1
        for position, op in enumerate(self.runs):
            if not 0 <= op < count:
                raise GraphError(f"run {position} names operation {op}; the graph has {count}")
            operation = graph.operations[op]
            if seen[op] and not operation.recomputable:
                raise GraphError(f"run {position}: {operation.name} may run only once")
            if operation.order_sensitive and not seen[op]:
                if op < last_sensitive:
                    raise GraphError(
                        f"run {position}: {operation.name} runs after "
                        f"{graph.operations[last_sensitive].name}; both sample random numbers or "
                        "touch a buffer, so they keep their order"
                    )
                last_sensitive = op
            for v in operation.inputs:
                if not seen[graph.producer[v]]:
                    raise GraphError(
                        f"run {position}: {operation.name} reads {graph.values[v].name} "
                        "before it was ever produced"
                    )
            if operation.same_copy_as >= 0 and not seen[op]:
                for v in graph.shared_inputs(operation):
                    if latest_run[graph.producer[v]] > latest_run[operation.same_copy_as]:
                        raise GraphError(
                            f"run {position}: {operation.name} needs the copy of "
                            f"{graph.values[v].name} from before it was recomputed"
                        )
            seen[op] += 1
            latest_run[op] = position
        for op, count_of_op in enumerate(seen):
            if not count_of_op:
                raise GraphError(f"{graph.operations[op].name} never runs")

    def keeps_order(self) -> bool:
        """True if operations run for the first time in the graph's order."""
        first = list(dict.fromkeys(self.runs))
        return first == sorted(first)

    def recomputed(self, graph: Graph) -> dict[int, int]:
        """Return how many extra times each operation runs, for those that run more than once."""
        run_counts = Counter(self.runs)
        return {op: run_counts[op] - 1 for op in range(len(graph)) if run_counts[op] > 1}


def missing_operations(graph: Graph, values: Iterable[int], live: Container[int]) -> list[int]:
    """Return the operations to run, in the graph's order, for `values` to be live, where the values
    of `live` already are."""
    operations: set[int] = set()
    pending = [v for v in values if v not in live]
    while pending:
        op = graph.producer[pending.pop()]
        if op not in operations:
            operations.add(op)
            pending += [v for v in graph.operations[op].inputs if v not in live]
    return sorted(operations)
