"""The step for budgets that are hard to meet: it finds a schedule that fits, or raises why there is
none."""

from __future__ import annotations

from collections.abc import Sequence

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.limits.units import format_bytes
from remat.milp.backends import SolverOutcome
from remat.progress import Clock
from remat.simulate import peak_and_time
from remat.strategies.infeasible import infeasible
from remat.strategies.search.state import SearchState
from remat.strategies.search.step import SearchStep, run_steps

_BOUND_TOLERANCE = 1e-6
"""Relative error that a solver's tolerances may have added to a bound."""


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

    Raises `InfeasibleBudget` with a small peak that `quick_peak_steps` reach or, if time ran out
    first, `SolverTimeout`.
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
    """Return the error for a budget that is proved infeasible, with a small peak to suggest."""
    error_state = state.peak_search_state()
    error_state.add_schedules(() if peak_state is None else peak_state.schedules)
    run_steps(quick_peak_steps, error_state)
    assert state.task.budget_bytes is not None
    peak_bytes, _ = peak_and_time(error_state.graph, error_state.best)
    return infeasible(state.task.graph, state.task.budget_bytes, peak_bytes, reason, proved=True)
