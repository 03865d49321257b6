"""An order of the operations with a small peak, nothing run twice.

First list schedules: of the operations that can run, the one that adds least to the memory, by
several measures of what it adds. Then annealing from the best of them, with a budget that is
always a little under the smallest peak so far.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from remat.graph import Graph
from remat.heuristics.annealing.anneal import Cooling, Mix, anneal
from remat.heuristics.annealing.moves import block, relocate, transpose
from remat.heuristics.annealing.profile import Profile
from remat.heuristics.annealing.reorder import guarded
from remat.schedule import Schedule
from remat.simulate import peak_and_time

EFFORT = 200_000
"""Moves tried by default, some 10 s on one core."""

_COOLING = Cooling(hot=0.5, cold=0.02, low=1.0, high=1.0)
_MIX = Mix(((relocate, 16), (transpose, 3), (block, 1)))
_STEP = 0.005
_SHARES = (0.0, 0.5, 1.0)
"""How much a value counts as freed by a reader that is not its last."""


def _never() -> bool:
    return False


def least_peak_order(
    graph: Graph,
    *,
    target_bytes: int,
    effort: int = EFFORT,
    seed: int = 0,
    stop: Callable[[], bool] = _never,
) -> tuple[int, ...]:
    """A topological order whose peak without recomputation is small; the search ends at one of at
    most `target_bytes`, constant memory included.

    Never a larger peak than that of the graph's own order. Respects the boundary and the order of
    the operations that run once (see `guarded`).
    """
    frame = guarded(graph)

    def peak(order: list[int]) -> int:
        return peak_and_time(graph, Schedule.of(order))[0]

    orders = [list(range(len(frame)))] + [_listed(frame, share) for share in _SHARES]
    best = min(orders, key=peak)
    best_bytes = peak(best)
    if best_bytes <= target_bytes or len(best) < 2:
        return tuple(best)

    def below(peak_bytes: int) -> int:
        return max(target_bytes, min(int(peak_bytes * (1 - _STEP)), peak_bytes - 1))

    def lower(profile: Profile) -> bool:
        nonlocal best, best_bytes
        best, best_bytes = profile.runs, profile.peak_bytes()
        profile.shift_budget(below(best_bytes))
        return best_bytes <= target_bytes

    profile = Profile(frame, below(best_bytes), best)
    anneal(profile, Random(seed), _COOLING, _MIX, effort=effort, fits=lower, stop=stop)
    return tuple(best)


def _listed(graph: Graph, share: float) -> list[int]:
    """A list schedule; each reader of a value that is not its last is credited with a share of it,
    divided by the readers left."""
    size = [0 if v in graph.results else value.size_bytes for v, value in enumerate(graph.values)]
    made = [
        sum(size[v] for v in operation.outputs if graph.consumers[v])
        for operation in graph.operations
    ]
    left = [len(users) for users in graph.consumers]
    missing = [len(operation.inputs) for operation in graph.operations]
    ready = [op for op, count in enumerate(missing) if not count]
    order: list[int] = []

    def growth(op: int) -> tuple[float, int]:
        freed = sum(
            size[v] if left[v] == 1 else share * size[v] / left[v]
            for v in graph.operations[op].inputs
        )
        return made[op] - freed, op

    while ready:
        op = min(ready, key=growth)
        ready.remove(op)
        order.append(op)
        for v in graph.operations[op].inputs:
            left[v] -= 1
        for v in graph.operations[op].outputs:
            for user in graph.consumers[v]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
    return order
