"""The step for budgets that are hard to meet: a schedule that fits, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.limits.budget import format_bytes
from remat.milp.backends import Outcome
from remat.simulate import peak_and_time
from remat.strategies.infeasible import infeasible
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known
from remat.strategies.search.step import Step, run

_ROUNDING = 1e-6
"""Of a bound: what a solver's tolerances may have added to it."""


def nothing_fits(known: Known) -> bool:
    """Whether no schedule within the budget is known."""
    return not known.rated


def reach(steps: Sequence[Step], nearest: Sequence[Step], known: Known, clock: Clock) -> None:
    """Offers a schedule within the budget, found by `steps` for the smallest peak. Raises
    `InfeasibleBudget`, with what `nearest` finds, or, if time ran out before, `SolverTimeout`."""
    budget_bytes = known.task.budget_bytes
    assert budget_bytes is not None
    small = known.smallest(target_bytes=budget_bytes)
    run(steps, small)
    if small.objective <= budget_bytes:
        known.offer([small.best])
        return
    smallest = f"the smallest peak found is {small.objective:,} bytes"
    failure, over = known.runner.failure, small.over_slots
    if clock.is_cancelled():
        raise RematError("the solve was cancelled before any schedule was known")
    if failure:
        raise SolverError(
            f"{failure}. No schedule within {format_bytes(budget_bytes)} is known without it; "
            f"{smallest}: a budget of that needs no solver"
        )
    if over is not None and over.is_complete:
        is_optimum = over.outcome is Outcome.OPTIMAL and known.options.peak_gap == 0
        if is_optimum or (over.bound or 0) > budget_bytes * (1 + _ROUNDING):
            # The run may have ended as soon as the budget was excluded.
            raise refusal(known, nearest, "no schedule of this order of the operations fits", small)
    if clock.is_over():
        raise SolverTimeout(
            f"no schedule within {format_bytes(budget_bytes)} was found in "
            f"{known.options.time_limit:g} s, and it is not excluded that there is one; "
            f"{smallest}: raise `time_limit` or the budget"
        )
    reason = "no schedule was found that fits, which is no proof that there is none"
    raise infeasible(known.task.graph, budget_bytes, int(small.objective), reason, proved=False)


def refusal(
    known: Known, nearest: Sequence[Step], reason: str, small: Known | None = None
) -> InfeasibleBudget:
    """The error for a budget that is proved impossible, with the smallest peak that is found."""
    near = known.smallest()
    near.offer(() if small is None else small.schedules)
    run(nearest, near)
    assert known.task.budget_bytes is not None
    peak_bytes, _ = peak_and_time(near.graph, near.best)
    return infeasible(known.task.graph, known.task.budget_bytes, peak_bytes, reason, proved=True)
