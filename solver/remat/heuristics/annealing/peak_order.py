"""An order of the operations with a small peak, without recomputation.

First list schedules: of the operations that are ready, run the one that adds least to the memory,
by several measures of that. Then annealing from the best of them, with a budget that is always
slightly below the smallest peak so far.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from remat.graph import Graph
from remat.heuristics.annealing.anneal import CoolingSchedule, MoveMix, anneal
from remat.heuristics.annealing.moves import block, relocate, transpose
from remat.heuristics.annealing.reorder import with_order_constraints
from remat.heuristics.annealing.schedule_profile import ScheduleProfile
from remat.schedule import Schedule
from remat.simulate import peak_and_time

DEFAULT_MAX_MOVES = 200_000
"""Moves tried by default, some 10 s on one core."""

_COOLING = CoolingSchedule(
    start_temperature=0.5, end_temperature=0.02, start_price=1.0, end_price=1.0
)
_MIX = MoveMix(((relocate, 16), (transpose, 3), (block, 1)))
_STEP = 0.005
_LAST_READER_SHARES = (0.0, 0.5, 1.0)
"""Shares of a value that count as freed by a reader that is not its last."""


def _never_stop() -> bool:
    return False


def small_peak_order(
    graph: Graph,
    *,
    target_bytes: int,
    max_moves: int = DEFAULT_MAX_MOVES,
    seed: int = 0,
    stop: Callable[[], bool] = _never_stop,
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
        _list_schedule(constrained, share) for share in _LAST_READER_SHARES
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


def _list_schedule(graph: Graph, share: float) -> list[int]:
    """Return a list schedule. Each reader of a value that is not its last is credited with a share
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
