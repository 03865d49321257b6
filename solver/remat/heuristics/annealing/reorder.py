"""Other orders of a graph's operations: which are allowed, and the graph in one of them.

The runtime requires more of an order than that inputs come first: the forward program ends where
the backward pass starts, and operations that run once or sample random numbers keep their order.
`with_order_constraints` adds both to the graph as values without bytes, after which every
topological order is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from remat.graph import Graph, Value
from remat.schedule import Schedule


def reorder_graph(
    graph: Graph, order: Sequence[int]
) -> tuple[Graph, Callable[[Schedule], Schedule]]:
    """Return the graph with its operations in `order`, and a function that converts its schedules
    to schedules of `graph`.

    Values, sizes and costs stay as they are; only the operations' indices change. Raises
    `GraphError` if the order is not topological.
    """
    index = {op: position for position, op in enumerate(order)}
    permuted = replace(
        graph,
        operations=tuple(graph.operations[op] for op in order),
        boundary=None if graph.boundary is None else index[graph.boundary],
    )

    def to_original(schedule: Schedule) -> Schedule:
        return Schedule.of(order[position] for position in schedule.runs)

    return permuted, to_original


def reindex_schedule(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return a schedule of a graph as one of the reordered graph, to start a search there."""
    index = {op: position for position, op in enumerate(order)}
    return Schedule.of(index[op] for op in schedule.runs)


def first_run_order(schedule: Schedule) -> tuple[int, ...]:
    """Return the operations in the order in which a schedule first runs them."""
    return tuple(dict.fromkeys(schedule.runs))


def with_order_constraints(graph: Graph) -> Graph:
    """Return the same graph with the additional constraints on an order, as values without bytes.

    Operations keep their indices, so a schedule of one graph is a schedule of the other. First runs
    stay on their side of the boundary; operations that run once or are order-sensitive stay in
    order.
    """
    return _with_pairs(graph, _across_boundary(graph) + _in_sequence(graph))


def with_fixed_order(graph: Graph) -> Graph:
    """Return the same graph where first runs stay in the graph's order: only recomputations can
    move."""
    return _with_pairs(graph, list(pairwise(range(len(graph)))))


def _with_pairs(graph: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """Return the graph with a value without bytes from the first to the second operation of each
    pair."""
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
    producers = [{graph.producer[v] for v in operation.inputs} for operation in graph.operations]
    # The other pairs follow from these: an operation before one of them is before the boundary,
    # too.
    last = [op for op in range(boundary) if not any(user < boundary for user in users[op])]
    after = range(boundary + 1, len(graph))
    first = [op for op in after if all(producer < boundary for producer in producers[op])]
    return [(op, boundary) for op in last] + [(boundary, op) for op in first]


def _in_sequence(graph: Graph) -> list[tuple[int, int]]:
    ordered = [
        op for op, o in enumerate(graph.operations) if o.order_sensitive or not o.recomputable
    ]
    return list(pairwise(ordered))
