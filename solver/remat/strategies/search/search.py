"""`search`: run a pipeline of steps on a search state, and return the best schedule with its
bound.

With a budget: retain everything if that fits; refuse a budget below what some operation needs;
else run the steps. Every schedule that is returned was simulated in integers and fits.
"""

from __future__ import annotations

from remat.milp.backends import SolverOutcome
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.search.pipeline import Pipeline
from remat.strategies.search.state import SearchState
from remat.strategies.search.step import run_steps
from remat.strategies.search.steps.feasibility import infeasible_budget_error

_BOUND_TOLERANCE = 1e-6
"""Relative error that a solver's tolerances may have added to a bound."""


def search(state: SearchState, pipeline: Pipeline) -> Solution:
    """Return the cheapest schedule within the budget or, without a budget, the one with the
    smallest peak. Raises `InfeasibleBudget` or `SolverTimeout`."""
    if state.is_peak_search:
        return _minimize_peak(state, pipeline)
    return _minimize_cost(state, pipeline)


def _minimize_peak(state: SearchState, pipeline: Pipeline) -> Solution:
    run_steps(pipeline.peak, state)
    is_proved = state.is_within_gap or _is_optimum(state)
    return Solution(state.best, state.bound, "order", is_proved, state.stats)


def _minimize_cost(state: SearchState, pipeline: Pipeline) -> Solution:
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
    if slots_bound_s and state.objective >= min_time_s:
        baseline_s = state.graph.baseline_time_s
        stats["slots_bound"] = min(slots_bound_s, state.objective) / baseline_s - 1
    best, time_s = state.best_overall()
    bound_s = min(state.bound, time_s)
    is_proved = _is_optimum(state) or state.is_good_enough(time_s)
    return Solution(best, bound_s, "order", is_proved, stats)


def _is_optimum(state: SearchState) -> bool:
    """True if the program over complete slots was solved to the requested gap."""
    result = state.slot_result
    return result is not None and result.is_complete and result.outcome is SolverOutcome.OPTIMAL
