"""The order of the operations searched as well: annealing, then the program over its best order.

Annealing over whole sequences (`heuristics.annealing`) takes up to 0.6 of the time. The order in
which its best schedule runs the operations first is that in which everything else then works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat.errors import InfeasibleBudget, SolverTimeout
from remat.graph import Graph
from remat.heuristics.annealing import (
    first_runs,
    in_order,
    least_peak_order,
    reordered,
    search_schedule,
)
from remat.heuristics.floor import least_peak_of_any_order_bytes
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.search.deadline import Clock

_SHARE = 0.6

_USABLE = 0.97
"""Of the time: the search that follows keeps back a share of its own, which is less in seconds."""

_MOVES_PER_S = 25_000
"""What one core does; more only means that the last rounds are cut off by the clock."""

_MOVES_PER_OPERATION = 6_000
_MOVES_PER_PAIR = 200
"""Small graphs need fewer."""

Solve = Callable[[Task, float], Solution]
"""Does a task in the graph's own order, within so many seconds."""


def is_worthwhile(graph: Graph) -> bool:
    """Whether order is likely to matter: not in a training step, where it is nearly forced."""
    return graph.boundary is None and not any(o.backward for o in graph.operations)


def least_cost(task: Task, solve: Solve, *, time_limit: float, seed: int) -> Solution:
    """The cheapest schedule found in any order; the bound holds for the order it came from, or for
    all orders where nothing runs twice. Raises `InfeasibleBudget` if nothing fits in any order
    tried."""
    clock = Clock.of(time_limit, task.cancel)
    graph, budget_bytes = task.graph, task.budget_bytes
    assert budget_bytes is not None
    if least_peak_of_any_order_bytes(graph) > budget_bytes:
        return solve(task, time_limit)  # raises InfeasibleBudget
    annealed = search_schedule(
        graph,
        budget_bytes,
        Schedule.keep_all(graph) if task.start is None else task.start,
        effort=_effort(graph, time_limit),
        seed=seed,
        stop=clock.within(_SHARE * time_limit).is_over,
    )
    seconds = clock.passed_s
    peak_bytes, time_s = peak_and_time(graph, annealed)
    fits = peak_bytes <= budget_bytes
    if fits and len(annealed) == len(graph):
        return Solution(annealed, time_s, "all orders", True, {"order_s": seconds})
    order = first_runs(annealed)
    permuted, back = reordered(graph, order)
    known = in_order(annealed, order) if fits else None
    try:
        in_order_now = replace(task, graph=permuted, start=known)
        found = solve(in_order_now, max(1.0, _USABLE * time_limit - seconds))
    except (InfeasibleBudget, SolverTimeout):
        if not fits:
            raise
        found = Solution(in_order(annealed, order))
    return replace(found, schedule=back(found.schedule), stats={**found.stats, "order_s": seconds})


def least_peak(task: Task, solve: Solve, *, time_limit: float, seed: int) -> Solution:
    """The schedule with the smallest peak in the graph's order or in one that needs less."""
    clock = Clock.of(time_limit, task.cancel)
    graph = task.graph
    order = least_peak_order(
        graph,
        target_bytes=0,
        effort=_effort(graph, time_limit),
        seed=seed,
        stop=clock.within(_SHARE * time_limit).is_over,
    )
    seconds = clock.passed_s
    left = max(1.0, (time_limit - seconds) / 2)
    permuted, back = reordered(graph, order)
    found = solve(replace(task, graph=permuted, start=None), left)
    found = replace(found, schedule=back(found.schedule))
    kept = solve(task, left)
    best = min(found, kept, key=lambda s: peak_and_time(graph, s.schedule)[0])
    failure = {**kept.failure, **found.failure}
    return replace(best, stats={**failure, **best.stats, "order_s": seconds})


def _effort(graph: Graph, time_limit: float) -> int:
    count = len(graph)
    by_size = min(_MOVES_PER_OPERATION * count, _MOVES_PER_PAIR * count**2)
    return int(min(float(by_size), _SHARE * time_limit * _MOVES_PER_S))  # a limit may be infinite
