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
from random import Random

from remat.graph import Graph, Value
from remat.heuristics.annealing.moves import (
    CoolingSchedule,
    anneal,
    mix_of_moves,
    move_neighbouring_runs,
    relocate_run,
    transpose_runs,
)
from remat.heuristics.annealing.schedule_profile import ScheduleProfile
from remat.schedule import Schedule
from remat.simulate import peak_and_time


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


def schedule_in_order(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return a schedule of a graph as a schedule of the graph that `reorder_graph` returns for this
    order."""
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
    return _with_order_pairs(graph, _boundary_pairs(graph) + _fixed_order_pairs(graph))


def with_fixed_order(graph: Graph) -> Graph:
    """Return the same graph where first runs stay in the graph's order: only recomputations can
    move."""
    return _with_order_pairs(graph, list(pairwise(range(len(graph)))))


def _with_order_pairs(graph: Graph, pairs: list[tuple[int, int]]) -> Graph:
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


def _boundary_pairs(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs of operations whose order keeps the forward before the boundary, and the
    backward after it."""
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


def _fixed_order_pairs(graph: Graph) -> list[tuple[int, int]]:
    """Return the pairs of successive operations that run only once or are order-sensitive."""
    ordered = [
        op for op, o in enumerate(graph.operations) if o.order_sensitive or not o.recomputable
    ]
    return list(pairwise(ordered))


_COOLING = CoolingSchedule(
    start_temperature=0.5, end_temperature=0.02, start_price=1.0, end_price=1.0
)
_MIX = mix_of_moves((relocate_run, 16), (transpose_runs, 3), (move_neighbouring_runs, 1))
_STEP = 0.005
_LAST_READER_SHARES = (0.0, 0.5, 1.0)
"""Shares of a value that count as freed by a reader that is not its last."""


def small_peak_order(
    graph: Graph,
    *,
    target_bytes: int,
    max_moves: int = 200_000,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[int, ...]:
    """Return a topological order whose peak without recomputation is small.

    The search ends at a peak of at most `target_bytes`, constant memory included. The peak is never
    larger than that of the graph's own order. Respects the boundary and the order of the operations
    that run once (see `with_order_constraints`).
    """
    constrained = with_order_constraints(graph)

    def peak(order: list[int]) -> int:
        return peak_and_time(graph, Schedule.of(order))[0]

    orders = [list(range(len(constrained)))] + [
        _list_scheduled_order(constrained, share) for share in _LAST_READER_SHARES
    ]
    best = min(orders, key=peak)
    best_bytes = peak(best)
    if best_bytes <= target_bytes or len(best) < 2:
        return tuple(best)

    def target_below(peak_bytes: int) -> int:
        return max(target_bytes, min(int(peak_bytes * (1 - _STEP)), peak_bytes - 1))

    def lower_budget(profile: ScheduleProfile) -> bool:
        nonlocal best, best_bytes
        best, best_bytes = profile.runs, profile.peak_bytes()
        profile.set_budget(target_below(best_bytes))
        return best_bytes <= target_bytes

    profile = ScheduleProfile(constrained, target_below(best_bytes), best)
    anneal(
        profile, Random(seed), _COOLING, _MIX, max_moves=max_moves, on_fit=lower_budget, stop=stop
    )
    return tuple(best)


def _list_scheduled_order(graph: Graph, share: float) -> list[int]:
    """Return an order by list scheduling: of the operations that are ready, the one with the least
    growth of memory comes next. A reader of a value that is not its last counts as freeing `share`
    of it, divided by the number of remaining readers."""
    size = [0 if v in graph.results else value.size_bytes for v, value in enumerate(graph.values)]
    output_bytes = [
        sum(size[v] for v in operation.outputs if graph.consumers[v])
        for operation in graph.operations
    ]
    remaining_readers = [len(users) for users in graph.consumers]
    missing_inputs = [len(operation.inputs) for operation in graph.operations]
    ready = [op for op, count in enumerate(missing_inputs) if not count]
    order: list[int] = []

    def growth(op: int) -> tuple[float, int]:
        freed_bytes = sum(
            size[v] if remaining_readers[v] == 1 else share * size[v] / remaining_readers[v]
            for v in graph.operations[op].inputs
        )
        return output_bytes[op] - freed_bytes, op

    while ready:
        op = min(ready, key=growth)
        ready.remove(op)
        order.append(op)
        for v in graph.operations[op].inputs:
            remaining_readers[v] -= 1
        for v in graph.operations[op].outputs:
            for user in graph.consumers[v]:
                missing_inputs[user] -= 1
                if not missing_inputs[user]:
                    ready.append(user)
    return order
