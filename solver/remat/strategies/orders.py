"""The parts of `Auto` for graphs that are no training step: a search over orders of the
operations, and a step that anneals recomputations.

Annealing over whole sequences (`heuristics.annealing`) takes up to 0.6 of the time. The other steps
then work in the order in which its best schedule runs the operations first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat.errors import InfeasibleBudget, SolverTimeout
from remat.graph import Graph
from remat.heuristics.annealing.orders import (
    first_run_order,
    reorder_graph,
    schedule_in_order,
    small_peak_order,
)
from remat.heuristics.annealing.schedule_search import anneal_recomputations, anneal_schedule
from remat.heuristics.peak_bounds import peak_lower_bound_any_order_bytes
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.search.state import USABLE_SHARE, SearchState
from remat.strategies.search.step import SearchStep

_ANNEALING_SHARE = 0.6

_REMAINING_SHARE = 0.97
"""Share of the time limit for the search in the annealed order. That search plans with a share of
its own limit, which is less in seconds."""

_MOVES_PER_S = 25_000
"""Moves that one core tries in a second. With more, the clock ends the last rounds early."""

_MOVES_PER_OPERATION = 6_000
_MOVES_PER_PAIR = 200
"""Limit in moves per pair of operations: small graphs need fewer."""

SolveInOrder = Callable[[Task, float], Solution]
"""Function (task, time limit in seconds) that solves a task in its graph's own order."""


def minimize_cost_in_any_order(
    task: Task, solve: SolveInOrder, *, time_limit: float, seed: int
) -> Solution:
    """Return the cheapest schedule found in any order.

    Its bound holds for the order that it was found in, or for all orders if nothing is recomputed.
    Raises `InfeasibleBudget` if nothing fits in any order tried.
    """
    clock = Clock.of(USABLE_SHARE * time_limit, task.cancel)
    graph, budget_bytes = task.graph, task.budget_bytes
    assert budget_bytes is not None
    if peak_lower_bound_any_order_bytes(graph) > budget_bytes:
        return solve(task, time_limit)  # raises InfeasibleBudget
    annealed = anneal_schedule(
        graph,
        budget_bytes,
        Schedule.keep_all(graph) if task.start is None else task.start,
        max_moves=_max_annealing_moves(graph, time_limit),
        seed=seed,
        stop=clock.limited_to(_ANNEALING_SHARE * time_limit).is_set,
    )
    annealing_s = clock.elapsed_s
    peak_bytes, time_s = peak_and_time(graph, annealed)
    is_within_budget = peak_bytes <= budget_bytes
    if is_within_budget and len(annealed) == len(graph):
        return Solution(annealed, time_s, "all orders", True, {"order_s": annealing_s})
    order = first_run_order(annealed)
    permuted, to_original = reorder_graph(graph, order)
    start = schedule_in_order(annealed, order) if is_within_budget else None
    try:
        permuted_task = replace(task, graph=permuted, start=start)
        remaining_s = max(1.0, _REMAINING_SHARE * time_limit - annealing_s)
        solution = solve(permuted_task, remaining_s)
    except (InfeasibleBudget, SolverTimeout):
        if not is_within_budget:
            raise
        solution = Solution(schedule_in_order(annealed, order))
    stats = {**solution.stats, "order_s": annealing_s}
    return replace(solution, schedule=to_original(solution.schedule), stats=stats)


def minimize_peak_in_any_order(
    task: Task, solve: SolveInOrder, *, time_limit: float, seed: int
) -> Solution:
    """Return the schedule with the smallest peak, in the graph's order or in an annealed order.
    `solve` solves in each of the two."""
    clock = Clock.of(USABLE_SHARE * time_limit, task.cancel)
    graph = task.graph
    order = small_peak_order(
        graph,
        target_bytes=0,
        max_moves=_max_annealing_moves(graph, time_limit),
        seed=seed,
        stop=clock.limited_to(_ANNEALING_SHARE * time_limit).is_set,
    )
    annealing_s = clock.elapsed_s
    remaining_s = max(1.0, (time_limit - annealing_s) / 2)
    permuted, to_original = reorder_graph(graph, order)
    reordered = solve(replace(task, graph=permuted, start=None), remaining_s)
    reordered = replace(reordered, schedule=to_original(reordered.schedule))
    original = solve(task, remaining_s)
    best = min(reordered, original, key=lambda s: peak_and_time(graph, s.schedule)[0])
    failure_stats = {**original.failure_stats, **reordered.failure_stats}
    return replace(best, stats={**failure_stats, **best.stats, "order_s": annealing_s})


def _max_annealing_moves(graph: Graph, time_limit: float) -> int:
    """Return the moves that annealing may try, by the size of the graph and the time limit."""
    count = len(graph)
    by_size = min(_MOVES_PER_OPERATION * count, _MOVES_PER_PAIR * count**2)
    by_time = _ANNEALING_SHARE * time_limit * _MOVES_PER_S  # the time limit may be infinite
    return int(min(float(by_size), by_time))


_GAP_SHARE = 0.1
"""Share of the requested gap at which annealing is not worth its time."""

_RECOMPUTATION_MOVES_PER_OPERATION = 1_000
_RECOMPUTATION_MOVES_PER_S = 15_000
"""Moves that one core tries in a second. With more, the clock ends the last round early."""


def anneal(state: SearchState, clock: Clock) -> None:
    """Add the cheapest schedule that annealing finds from the best incumbent. Nothing if that is
    within a tenth of the gap."""
    if state.is_good_enough(state.objective, _GAP_SHARE):
        return
    graph = state.graph
    max_moves = min(
        float(_RECOMPUTATION_MOVES_PER_OPERATION * len(graph)),
        clock.remaining_s * _RECOMPUTATION_MOVES_PER_S,
    )
    schedule = anneal_recomputations(
        graph,
        state.budget_bytes,
        state.best if state.incumbents else Schedule.keep_all(graph),
        max_moves=int(max_moves),
        seed=state.options.seed,
        stop=clock.is_set,
    )
    state.add_schedules([schedule])


ANNEALING = SearchStep("annealing", anneal, time_share=0.5, time_share_within_gap=0.15)
