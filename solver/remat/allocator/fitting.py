"""Plans that fit as torch's allocator counts: where a plan for a CUDA device would be allocated
more than its budget, the budget is lowered by the excess and solved for again.

Seldom more than one more solve: the excess is a matter of some mebibytes. It is not asked of "min",
which has no bytes to keep to, nor of 100% and more, which ask for no recomputation. With expandable
segments there is no excess.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

from remat.allocator.prediction import Prediction, is_on_cuda, with_prediction
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.limits.budget import Budget
from remat.planned import P
from remat.progress import Cancel

ROUNDS = 3
"""How many times a lower budget is solved for."""


def solve_within(
    trace: Trace,
    budget: Budget,
    solve: Callable[[Budget], P],
    *,
    is_expandable: bool | None = None,
    reserved_bytes: int | None = None,
    cancel: Cancel | None = None,
) -> P:
    """The plan of `solve(budget)`, or of a lower budget with which what the allocator hands out
    stays within the budget, and its segments within `reserved_bytes` where that is given.

    The plan's `budget_bytes` is then the lower one, and `stats["asked_budget_bytes"]` what was
    asked for. Where nothing fits the lower budget, the plan with the smallest excess is returned;
    its stats tell it. `is_expandable` says which segments the step will run with, by default
    what the environment says. Once `cancel` is set, the best plan so far is returned. Raises what
    `solve` raises for the budget itself.
    """
    if is_expandable is None:
        is_expandable = has_expandable_segments()
    plan = _told(solve(budget), trace)
    if not is_on_cuda(trace) or budget.is_min or (budget.share or 0) >= 1:
        return plan
    asked_bytes = plan.budget_bytes

    def excess(plan: P) -> int:
        found = Prediction.of_plan(plan)
        assert found is not None
        over = found.allocated(is_expandable=is_expandable) - asked_bytes
        if reserved_bytes is not None:
            over = max(over, found.reserved(is_expandable=is_expandable) - reserved_bytes)
        return over

    best, lower_bytes = plan, asked_bytes
    for _ in range(ROUNDS):
        over = excess(plan)
        is_cancelled = cancel is not None and cancel.is_set()
        if over <= 0 or is_cancelled:
            break
        lower_bytes -= over
        try:
            plan = _told(solve(Budget.parse(lower_bytes)), trace) if lower_bytes > 0 else best
        except (InfeasibleBudget, SolverTimeout):
            break
        except RematError:
            if cancel is None or not cancel.is_set():
                raise
            break
        if excess(plan) < excess(best):
            best = plan
    if best.budget_bytes == asked_bytes:
        return best
    return replace(best, stats={**best.stats, "asked_budget_bytes": asked_bytes})


def has_expandable_segments() -> bool:
    """Whether the environment tells torch's allocator to use expandable segments."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if found := re.search(r"expandable_segments:(\w+)", os.environ.get(name, "")):
            return found[1] == "True"
    return False


def _told(plan: P, trace: Trace) -> P:
    """With a prediction, where that is not there yet: a service may know only the graph."""
    return plan if Prediction.of_plan(plan) is not None else with_prediction(plan, trace)
