"""The option `infeasible`: an error if no plan fits the budget, or the smallest feasible peak."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from remat.errors import BudgetWarning, InfeasibleBudget, similar_names_hint
from remat.limits.budget import Budget
from remat.limits.units import format_bytes

INFEASIBLE_ERROR = "error"
"""Raise `InfeasibleBudget`."""

INFEASIBLE_SMALLEST = "smallest"
"""Return the plan for "min" (the smallest feasible peak), with a `BudgetWarning` that names the
budget and the peak."""

INFEASIBLE = (INFEASIBLE_ERROR, INFEASIBLE_SMALLEST)

T = TypeVar("T")


def is_smallest_accepted(infeasible: object) -> bool:
    """True if `infeasible` is "smallest", False if it is "error". Raises ValueError for anything
    else."""
    if isinstance(infeasible, str) and infeasible in INFEASIBLE:
        return infeasible == INFEASIBLE_SMALLEST
    near = similar_names_hint(infeasible, INFEASIBLE) if isinstance(infeasible, str) else ""
    raise ValueError(
        f"infeasible is {infeasible!r}{near}; pass {INFEASIBLE_ERROR!r} to raise an error if no "
        f"plan fits the budget, or {INFEASIBLE_SMALLEST!r} to plan for the smallest feasible peak"
    )


def plan_or_smallest(
    plan: Callable[[Budget], T],
    budget: Budget,
    infeasible: str,
    *,
    peak_bytes: Callable[[T], int],
    requested: Budget | None = None,
) -> T:
    """Return `plan(budget)`. With `infeasible="smallest"`, return `plan` for "min" and warn if
    `budget` is infeasible.

    `peak_bytes` returns the peak of a result, including memory that the user reserved.
    `requested` is the budget to name in the warning if it differs from `budget`. Raises the errors
    of `plan`, and ValueError for an unknown value of `infeasible`.
    """
    if not is_smallest_accepted(infeasible) or budget.is_min:
        return plan(budget)
    try:
        return plan(budget)
    except InfeasibleBudget:
        pass
    smallest = plan(Budget.parse("min"))
    warn_of_smallest(requested or budget, peak_bytes(smallest))
    return smallest


def warn_of_smallest(budget: Budget, peak_bytes: int) -> None:
    """Issue the `BudgetWarning` for a plan with the smallest peak in place of `budget`."""
    text = repr(budget.requested)
    if not isinstance(budget.requested, str):
        text = f"of {format_bytes(budget.requested)} ({budget.requested:,} bytes)"
    warnings.warn(
        f"no plan fits the budget {text}: planned for the smallest feasible peak instead, "
        f'{format_bytes(peak_bytes)} ({peak_bytes:,} bytes). Pass "min" or at least that, or make '
        "the batch smaller",
        BudgetWarning,
        stacklevel=3,
    )
