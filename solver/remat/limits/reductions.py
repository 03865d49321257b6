"""Lower budgets for plans that fit their budget, but not what a judge measures.

A judge replays torch's allocator, or adds the step of an optimizer: its bytes are known only after
a schedule is. The budget is lowered by the excess, and solved for once more. One more solve is
nearly always enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.progress import Cancel, is_cancelled

MAX_BUDGET_REDUCTIONS = 3
"""Upper limit of the solves for a lower budget."""

T = TypeVar("T")


class Verdict(NamedTuple):
    """The judgement of a plan: `excess_bytes` above what is allowed, 0 or less if it fits, and the
    bytes to lower the next budget by, 0 if no lower budget helps."""

    excess_bytes: int
    lower_by_bytes: int


def lower_until_accepted(
    plan: T,
    budget_bytes: int,
    solve: Callable[[int], T],
    judge: Callable[[T], Verdict],
    cancel: Cancel | None = None,
) -> T:
    """Return `plan`, which was solved for `budget_bytes`, or the plan for a lower budget that a
    judge accepts; if it accepts none, the plan with the smallest excess.

    `solve` returns the plan for a budget in bytes. No budget is tried after the first infeasible
    one, or once `cancel` is set.
    """
    best, verdict = plan, judge(plan)
    least_bytes = verdict.excess_bytes
    for _ in range(MAX_BUDGET_REDUCTIONS):
        budget_bytes -= verdict.lower_by_bytes
        is_final = verdict.excess_bytes <= 0 or not verdict.lower_by_bytes or budget_bytes <= 0
        if is_final or is_cancelled(cancel):
            break
        try:
            plan = solve(budget_bytes)
        except RematError as error:
            if is_cancelled(cancel) or isinstance(error, InfeasibleBudget | SolverTimeout):
                break
            raise
        verdict = judge(plan)
        if verdict.excess_bytes < least_bytes:
            best, least_bytes = plan, verdict.excess_bytes
    return best
