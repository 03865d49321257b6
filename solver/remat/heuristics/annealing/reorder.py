"""Other orders of a graph's operations: which are allowed, and the graph in one of them.

The runtime asks more of an order than that inputs come first: the forward program ends where the
backward pass starts, and operations that run once or draw random numbers keep their order.
`guarded` writes both into the graph as values without bytes, after which every topological order
is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from remat.graph import Graph, Value
from remat.schedule import Schedule


def reordered(graph: Graph, order: Sequence[int]) -> tuple[Graph, Callable[[Schedule], Schedule]]:
    """The graph with its operations in `order`, and what takes its schedules back to `graph`.

    Values, sizes and costs stay as they are; only operations' indices change. Raises `GraphError`
    if the order is not topological.
    """
    index = {op: turn for turn, op in enumerate(order)}
    permuted = replace(
        graph,
        operations=tuple(graph.operations[op] for op in order),
        boundary=None if graph.boundary is None else index[graph.boundary],
    )

    def back(schedule: Schedule) -> Schedule:
        return Schedule.of(order[turn] for turn in schedule.runs)

    return permuted, back


def in_order(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """A schedule of a graph as one of the same graph reordered, to start a search there."""
    index = {op: turn for turn, op in enumerate(order)}
    return Schedule.of(index[op] for op in schedule.runs)


def first_runs(schedule: Schedule) -> tuple[int, ...]:
    """The operations in the order in which a schedule first runs them."""
    return tuple(dict.fromkeys(schedule.runs))


def guarded(graph: Graph) -> Graph:
    """The same graph with what an order must respect besides inputs, as values without bytes.

    Operations keep their indices, so a schedule of one is a schedule of the other. First runs stay
    on their side of the boundary; operations that run once or are sequenced stay in order.
    """
    return _with_pairs(graph, _across_boundary(graph) + _in_sequence(graph))


def pinned(graph: Graph) -> Graph:
    """The same graph where first runs stay in the graph's order: only recomputations move."""
    return _with_pairs(graph, list(pairwise(range(len(graph)))))


def _with_pairs(graph: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """With a value without bytes from the first to the second of each pair."""
    inputs = [list(operation.inputs) for operation in graph.operations]
    outputs = [list(operation.outputs) for operation in graph.operations]
    values = list(graph.values)
    for before, after in dict.fromkeys(pairs):
        inputs[after].append(len(values))
        outputs[before].append(len(values))
        values.append(Value(f"{before} before {after}", 0))
    operations = tuple(
        replace(operation, inputs=tuple(inputs[op]), outputs=tuple(outputs[op]))
        for op, operation in enumerate(graph.operations)
    )
    return replace(graph, operations=operations, values=tuple(values))


def _across_boundary(graph: Graph) -> list[tuple[int, int]]:
    boundary = graph.boundary
    if boundary is None:
        return []
    users = [
        [c for v in operation.outputs for c in graph.consumers[v]] for operation in graph.operations
    ]
    makers = [{graph.producer[v] for v in operation.inputs} for operation in graph.operations]
    # The others follow from these: what precedes one of them precedes the boundary too.
    last = [op for op in range(boundary) if not any(user < boundary for user in users[op])]
    after = range(boundary + 1, len(graph))
    first = [op for op in after if all(maker < boundary for maker in makers[op])]
    return [(op, boundary) for op in last] + [(boundary, op) for op in first]


def _in_sequence(graph: Graph) -> list[tuple[int, int]]:
    kept = [op for op, o in enumerate(graph.operations) if o.sequenced or not o.recomputable]
    return list(pairwise(kept))
