"""How much memory a plan may use: the budget, less the bytes that others need of it; and the option
`infeasible`, which says what happens if no plan fits: an error, or the smallest feasible peak."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from remat.errors import BudgetError, BudgetWarning, InfeasibleBudget, similar_names_hint
from remat.limits.budget import Budget
from remat.limits.units import format_bytes

SEGMENTS_MARGIN = 0.02
"""Fraction of the memory that the segments of torch's allocator leave to others: their predicted
size already includes fragmentation."""

_RESERVED = "are reserved"
_EXTERNAL = "are used outside this graph (other graphs of the step, other modules, or `reserve`)"
_EXCESS = "are what the kernels of an earlier plan took above its budget"


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory limits of one planning.

    `budget` is what the user requested: bytes, a percentage of the baseline's peak, or "min".
    `reserve_bytes` of it are for other users of the memory, such as an optimizer's state; this
    needs a budget in bytes. `external_bytes` are allocated outside the planned graph while it
    runs. `excess_bytes` are those by which the kernels of an earlier plan exceeded its budget: the
    next plan has to be smaller by as much. `segments_bytes`, if given, limits what torch's
    allocator reserves, as for the budget "auto".
    """

    budget: Budget
    reserve_bytes: int = 0
    external_bytes: int = 0
    excess_bytes: int = 0
    segments_bytes: int | None = None

    def with_budget(self, budget: Budget) -> Limits:
        """Return the limits for another budget. With "min", nothing is reserved."""
        return replace(
            self, budget=budget, reserve_bytes=0 if budget.is_min else self.reserve_bytes
        )

    def check_reserve(self) -> None:
        """Raise `BudgetError` unless the budget is in bytes and larger than the reserve."""
        budget_bytes = self.budget.size_bytes
        if budget_bytes is None:
            raise BudgetError(
                "`reserve` needs a budget in bytes; got the relative budget "
                f'{self.budget.requested!r}. Pass bytes, such as "8GiB", or "auto"'
            )
        if self.reserve_bytes >= budget_bytes:
            raise BudgetError(
                nothing_left(budget_bytes, f"{format_bytes(self.reserve_bytes)} {_RESERVED}")
            )

    @property
    def budget_after_reserve(self) -> Budget:
        """The budget without the reserve; the unchanged budget if nothing is reserved. Raises
        `BudgetError` as `check_reserve` does."""
        if not self.reserve_bytes:
            return self.budget
        self.check_reserve()
        assert self.budget.size_bytes is not None
        return Budget.parse(self.budget.size_bytes - self.reserve_bytes)

    def available_bytes(self, baseline_bytes: int, library_bytes: int = 0) -> int | None:
        """Return the largest peak in bytes that a plan of the graph may have; None for "min".

        `baseline_bytes` is the peak without recomputation, of which `library_bytes` are allocated
        by libraries; only a percentage depends on them. Raises `InfeasibleBudget` where external
        memory leaves nothing, and `BudgetError` as `check_reserve` does.
        """
        budget_bytes = self.budget_after_reserve.in_bytes(baseline_bytes, library_bytes)
        if budget_bytes is None:
            return None
        used_bytes = self.external_bytes + self.excess_bytes
        available_bytes = budget_bytes - used_bytes
        if used_bytes and available_bytes <= 0:
            outside_bytes = self.external_bytes + self.reserve_bytes
            parts = ((outside_bytes, _EXTERNAL), (self.excess_bytes, _EXCESS))
            reasons = [f"{format_bytes(size)} {reason}" for size, reason in parts if size]
            budget_bytes += self.reserve_bytes
            raise InfeasibleBudget(nothing_left(budget_bytes, " and ".join(reasons)))
        return available_bytes

    def share_bytes(self, part_bytes: int, baseline_bytes: int) -> int | None:
        """Return what the budget allows for `part_bytes` of the baseline's peak, in proportion:
        the percentage of the budget applied to that part. None for a budget in bytes or "min"."""
        budget_bytes = self.budget.in_bytes(baseline_bytes)
        if budget_bytes is None or self.budget.size_bytes is not None:
            return None
        return budget_bytes * part_bytes // max(1, baseline_bytes)

    @contextmanager
    def infeasible_with_reserve(self) -> Iterator[None]:
        """Add the reserve and the external memory to the smallest feasible budget that an
        `InfeasibleBudget` raised inside of this context names: to the user, both are part of the
        budget. Errors for the budget "min" stay as they are."""
        used_bytes = 0 if self.budget.is_min else self.reserve_bytes + self.external_bytes
        try:
            yield
        except InfeasibleBudget as error:
            if not used_bytes or error.min_feasible_bytes is None:
                raise
            min_feasible_bytes = error.min_feasible_bytes + used_bytes
            reason = _EXTERNAL if self.external_bytes else _RESERVED
            raise InfeasibleBudget(
                f"{error} Another {format_bytes(used_bytes)} {reason}: with them, pass at least "
                f"{min_feasible_bytes:,} bytes.",
                min_feasible_bytes=min_feasible_bytes,
                is_proved=error.is_proved,
            ) from None


def nothing_left(budget_bytes: int, reason: str) -> str:
    """Return the error text for a budget of which nothing is left to a plan; `reason` says what
    uses it ("2.00 GiB are reserved")."""
    return (
        f"the budget of {format_bytes(budget_bytes)} leaves nothing for the step: "
        f"{reason}; raise the budget"
    )


# -- no plan fits ----------------------------------------------------------------------------------

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
