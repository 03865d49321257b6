"""The search for a proved optimum: steps that know more and more, and what is proved in the end.

For a cost: keep everything if that fits; refuse a budget below what some operation needs; else do
the steps. Every schedule that comes back was simulated in integers and fits.
"""

from __future__ import annotations

from remat.milp.backends import Outcome
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.search.pipeline import Pipeline
from remat.strategies.search.state import Known
from remat.strategies.search.step import run
from remat.strategies.search.steps.feasibility import refusal

_ROUNDING = 1e-6
"""Of a bound: what a solver's tolerances may have added to it."""


def search(known: Known, steps: Pipeline) -> Solution:
    """The cheapest schedule within the budget or, without one, the one with the smallest peak.
    Raises `InfeasibleBudget` or `SolverTimeout`."""
    return _least_peak(known, steps) if known.is_for_peak else _least_cost(known, steps)


def _least_peak(known: Known, steps: Pipeline) -> Solution:
    run(steps.peak, known)
    proved = known.is_within_gap or _is_optimum(known)
    return Solution(known.best, known.bound, "order", proved, known.stats)


def _least_cost(known: Known, steps: Pipeline) -> Solution:
    graph, budget_bytes = known.task.graph, known.task.budget_bytes
    assert budget_bytes is not None
    keep_all = Schedule.keep_all(graph)
    if peak_and_time(graph, keep_all)[0] <= budget_bytes:
        return Solution(keep_all, graph.total_cost_s, "all orders", True, known.stats)
    if known.floor_bytes > budget_bytes:
        need = f"one operation needs {known.floor_bytes:,} bytes with what must be there by then"
        raise refusal(known, steps.nearest, need)
    run(steps.cost, known)
    return _judged(known)


def _judged(known: Known) -> Solution:
    """The cheapest schedule, with what is proved for every schedule of the order.

    What is proved over slots says something about the order only where they are complete. Elsewhere
    it is told as a fact beside that.
    """
    found, stats = known.over_slots, known.stats
    slots_s = None if found is None or found.is_complete else found.bound
    # Of a schedule that is better by far than all over the slots, these say nothing.
    if slots_s and known.objective >= (1 - known.options.gap - _ROUNDING) * slots_s:
        stats["slots_bound"] = min(slots_s, known.objective) / known.graph.total_cost_s - 1
    best, best_s = known.best_of_all()
    bound_s = min(known.bound, best_s)
    proved = _is_optimum(known) or known.is_enough(best_s)
    return Solution(best, bound_s, "order", proved, stats)


def _is_optimum(known: Known) -> bool:
    found = known.over_slots
    return found is not None and found.is_complete and found.outcome is Outcome.OPTIMAL
