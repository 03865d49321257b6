"""The search of `Auto` and `Exact`: their steps, in order, with their shares of the time, and what
follows from the last of them.

With a budget: retain everything if that fits; refuse a budget below what some operation needs;
else run the steps. Every schedule that is returned was simulated in integers and fits.

A step starts only while the requested gap is not reached, unless it has a time share for that case
too: see `SearchStep`. The steps depend on the graph alone, so they can be inspected:

    >>> [step.name for step in pipeline.exact_pipeline().cost]
    ['relaxation', 'eviction', 'feasibility', 'milp']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.graph import Graph
from remat.limits.units import format_bytes
from remat.milp.backends import SolverOutcome
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import infeasible
from remat.strategies.search.block_programs import (
    find_repeated_blocks,
    share_block_decisions,
)
from remat.strategies.search.eviction import (
    add_checkpoint_cuts,
    evict_by_advice,
    evict_for_cost,
    evict_for_peak,
    relax_at_checkpoint_cuts,
    run_quick_baselines,
)
from remat.strategies.search.slot_programs import (
    evict_by_relaxation,
    improve_windows,
    is_gap_open,
    minimize_cost_over_slots,
    minimize_peak_over_slots,
    recombine_relaxation,
)
from remat.strategies.search.state import SearchState
from remat.strategies.search.step import SearchStep, run_steps


class Pipeline(NamedTuple):
    """The step lists of a strategy: `cost` for the least time within a budget, `peak` for the
    smallest peak, and `quick_peak` for a small peak to name in the error of an infeasible
    budget."""

    cost: tuple[SearchStep, ...]
    peak: tuple[SearchStep, ...]
    quick_peak: tuple[SearchStep, ...]


def _has_no_start(state: SearchState) -> bool:
    """True if the search has no schedule to start from. With one, such as in an annealed order,
    baselines do not apply, and are slow."""
    return state.start is None


RELAXATION = SearchStep("relaxation", relax_at_checkpoint_cuts, time_share_within_gap=1.0)

BASELINES = SearchStep("baselines", run_quick_baselines, time_share=0.2)

PEAK = (
    SearchStep("peak_baselines", run_quick_baselines, time_share=0.2, time_share_within_gap=0.2),
    SearchStep("peak_eviction", evict_for_peak, time_share=0.2, time_share_within_gap=0.2),
    SearchStep("peak_milp", minimize_peak_over_slots),
)


def exact_pipeline() -> Pipeline:
    """Return the steps of `Exact`: a relaxation and eviction to start from, then one program."""
    peak = PEAK[1:]
    return Pipeline(
        cost=(
            RELAXATION,
            SearchStep("eviction", evict_for_cost, time_share=0.25, time_share_within_gap=0.25),
            SearchStep(
                "feasibility",
                partial(find_feasible_schedule, peak, peak),
                is_needed=has_no_incumbent,
                must_succeed=True,
            ),
            SearchStep("milp", minimize_cost_over_slots),
        ),
        peak=peak,
        quick_peak=peak,
    )


def auto_pipeline(
    graph: Graph, annealing: SearchStep | None = None, *, has_complete_slots: bool = True
) -> Pipeline:
    """Return the steps of `Auto` for a graph of any size; `annealing` is for graphs that are no
    training step. Without complete slots, no program can prove a bound on the peak, so the search
    for the smallest one ends before it.

    The steps close the gap that eviction and the bound leave open from both sides. In graphs that
    are no training step, annealing places a few dozen recomputations among a thousand operations
    better than anything else, and eviction has less time. It also has less after the step for
    identical blocks, of which a large network has many; but it follows the advice of the relaxation
    before, which often reaches the gap at once.
    """
    blocks = find_repeated_blocks(graph)
    evict_share = 0.08 if blocks else 0.1 if annealing else 0.2
    quick_peak = PEAK[:-1]
    cost: list[SearchStep] = [RELAXATION]
    if blocks:
        share_decisions = partial(share_block_decisions, blocks)
        cost += [
            SearchStep("advised_eviction", evict_by_advice, time_share=0.3),
            SearchStep("identical_blocks", share_decisions, time_share=0.5),
        ]
    cost += [
        SearchStep(
            "eviction", evict_for_cost, time_share=evict_share, time_share_within_gap=evict_share
        ),
        replace(BASELINES, is_needed=_has_no_start) if annealing else BASELINES,
    ]
    if annealing:
        cost.append(annealing)
    cost += [
        SearchStep(
            "feasibility",
            partial(find_feasible_schedule, PEAK, quick_peak),
            is_needed=has_no_incumbent,
            must_succeed=True,
        ),
        SearchStep("checkpoint_cuts", add_checkpoint_cuts, time_share=0.3, is_concurrent=True),
        SearchStep("relaxation_support", recombine_relaxation, time_share=0.4),
        SearchStep("guided_eviction", evict_by_relaxation, time_share=0.2),
        SearchStep("milp", minimize_cost_over_slots, time_share=0.6),
        SearchStep("windows", improve_windows, is_needed=is_gap_open),
    ]
    return Pipeline(tuple(cost), PEAK if has_complete_slots else quick_peak, quick_peak)


_BOUND_TOLERANCE = 1e-6
"""Relative error that a solver's tolerances may have added to a bound."""


def search(state: SearchState, pipeline: Pipeline) -> Solution:
    """Return the cheapest schedule within the budget or, without a budget, the one with the
    smallest peak. Raises `InfeasibleBudget` or `SolverTimeout`."""
    if state.is_peak_search:
        return _search_smallest_peak(state, pipeline)
    return _search_least_cost(state, pipeline)


def _search_smallest_peak(state: SearchState, pipeline: Pipeline) -> Solution:
    run_steps(pipeline.peak, state)
    is_proved = state.is_within_gap or _is_slot_program_optimal(state)
    return Solution(state.best, state.bound, "order", is_proved, state.stats)


def _search_least_cost(state: SearchState, pipeline: Pipeline) -> Solution:
    graph, budget_bytes = state.task.graph, state.task.budget_bytes
    assert budget_bytes is not None
    keep_all = Schedule.keep_all(graph)
    if peak_and_time(graph, keep_all)[0] <= budget_bytes:
        return Solution(keep_all, graph.total_cost_s, "all orders", True, state.stats)
    bound_bytes = state.peak_lower_bound_bytes
    if bound_bytes > budget_bytes:
        reason = f"one operation needs {bound_bytes:,} bytes, with what is live by then"
        raise infeasible_budget_error(state, pipeline.quick_peak, reason)
    run_steps(pipeline.cost, state)
    return _cost_solution(state)


def _cost_solution(state: SearchState) -> Solution:
    """Return the cheapest schedule, with the bound for every schedule of the order.

    The bound over slots holds for the order only if the slots are complete. Otherwise it is
    recorded in the statistics only.
    """
    result, stats = state.slot_result, state.stats
    slots_bound_s = None if result is None or result.is_complete else result.bound
    # A schedule that is far better than all over the slots is not measured against their bound.
    min_time_s = (1 - state.options.gap - _BOUND_TOLERANCE) * (slots_bound_s or 0.0)
    baseline_s = state.graph.baseline_time_s
    if slots_bound_s and baseline_s > 0 and state.objective >= min_time_s:
        stats["slots_bound"] = min(slots_bound_s, state.objective) / baseline_s - 1
    best, time_s = state.best_overall()
    bound_s = min(state.bound, time_s)
    is_proved = _is_slot_program_optimal(state) or state.is_good_enough(time_s)
    return Solution(best, bound_s, "order", is_proved, stats)


def _is_slot_program_optimal(state: SearchState) -> bool:
    """True if the program over complete slots was solved to the requested gap."""
    result = state.slot_result
    return result is not None and result.is_complete and result.outcome is SolverOutcome.OPTIMAL


def has_no_incumbent(state: SearchState) -> bool:
    """True if no schedule within the budget has been found."""
    return not state.incumbents


def find_feasible_schedule(
    steps: Sequence[SearchStep],
    quick_peak_steps: Sequence[SearchStep],
    state: SearchState,
    clock: Clock,
) -> None:
    """Add a schedule within the budget, found by running `steps` for the smallest peak.

    Raises `InfeasibleBudget` with a small peak, which `quick_peak_steps` reach if the budget is
    proved infeasible. Raises `SolverTimeout` if time ran out first, `SolverError` if the solver
    failed, and `RematError` if cancelled.
    """
    budget_bytes = state.task.budget_bytes
    assert budget_bytes is not None
    peak_state = state.peak_search_state(target_bytes=budget_bytes)
    run_steps(steps, peak_state)
    if peak_state.objective <= budget_bytes:
        state.add_schedules([peak_state.best])
        return
    peak_text = f"the smallest peak found is {peak_state.objective:,} bytes"
    failure, result = state.runner.failure, peak_state.slot_result
    if clock.is_cancelled():
        raise RematError("the solve was cancelled before any schedule was found")
    if failure:
        raise SolverError(
            f"{failure}. No schedule within {format_bytes(budget_bytes)} was found without it; "
            f"{peak_text}: a budget of that needs no solver"
        )
    if result is not None and result.is_complete:
        is_optimum = result.outcome is SolverOutcome.OPTIMAL and state.options.peak_gap == 0
        if is_optimum or (result.bound or 0) > budget_bytes * (1 + _BOUND_TOLERANCE):
            # The run may have ended as soon as the budget was proved infeasible.
            raise infeasible_budget_error(
                state,
                quick_peak_steps,
                "no schedule of this order of the operations fits",
                peak_state,
            )
    if clock.is_set():
        raise SolverTimeout(
            f"no schedule within {format_bytes(budget_bytes)} was found in "
            f"{state.options.time_limit:g} s, and it is not excluded that there is one; "
            f"{peak_text}: raise `time_limit` or the budget"
        )
    reason = "no schedule was found that fits, which is no proof that there is none"
    raise infeasible(
        state.task.graph, budget_bytes, int(peak_state.objective), reason, proved=False
    )


def infeasible_budget_error(
    state: SearchState,
    quick_peak_steps: Sequence[SearchStep],
    reason: str,
    peak_state: SearchState | None = None,
) -> InfeasibleBudget:
    """Return the error for a budget that is proved infeasible, with a small peak to suggest. That
    is searched from the schedules of `peak_state`, if it is passed."""
    error_state = state.peak_search_state()
    error_state.add_schedules(() if peak_state is None else peak_state.schedules)
    run_steps(quick_peak_steps, error_state)
    assert state.task.budget_bytes is not None
    peak_bytes, _ = peak_and_time(error_state.graph, error_state.best)
    return infeasible(state.task.graph, state.task.budget_bytes, peak_bytes, reason, proved=True)
