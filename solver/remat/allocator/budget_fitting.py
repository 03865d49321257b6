"""Plans whose allocated bytes, as torch's allocator counts them, are within the budget.

If the allocator would allocate more for a plan than its budget, the budget is lowered by the excess
and solved for once more. The excess is some mebibytes, so that one more solve is nearly always
enough. Budgets of "min", which has no bytes to stay within, and of 100% or more, which need no
recomputation, are not lowered. With expandable segments there is no excess.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

from remat.allocator.prediction import is_on_cuda, with_prediction
from remat.documents.trace import Trace
from remat.limits.budget import Budget
from remat.limits.reductions import Verdict, lower_until_accepted
from remat.plan_data import P
from remat.progress import Cancel


def plan_within_allocator_budget(
    trace: Trace,
    budget: Budget,
    solve: Callable[[Budget], P],
    *,
    is_expandable: bool | None = None,
    reserved_bytes: int | None = None,
    cancel: Cancel | None = None,
) -> P:
    """Return the plan of `solve(budget)`, or of a lower budget so that the allocator's allocated
    bytes are within `budget`, and its reserved bytes within `reserved_bytes` if that is passed.

    The budget is not lowered for a trace that is not on CUDA, for "min", and from "100%" on. A plan
    for a lower budget has that as its `budget_bytes`, and the original one in its terms. If no plan
    fits the lower budget, the plan with the smallest excess is returned; its `allocator` has the
    predicted bytes. `is_expandable` is True if the step will run with expandable segments; the
    default is the environment's setting. Once `cancel` is set, the best plan so far is returned.
    Raises the errors of `solve(budget)`.
    """
    if is_expandable is None:
        is_expandable = uses_expandable_segments()

    def plan_once(budget: Budget | int) -> P:
        """Return a plan with a prediction. A plan from a service that received only the graph has
        none yet."""
        plan = solve(Budget.parse(budget))
        return plan if plan.allocator is not None else with_prediction(plan, trace)

    plan = plan_once(budget)
    if not is_on_cuda(trace) or budget.is_min or (budget.share or 0) >= 1:
        return plan
    requested_bytes = plan.budget_bytes

    def judge(plan: P) -> Verdict:
        prediction = plan.allocator
        assert prediction is not None
        excess = prediction.allocated(is_expandable=is_expandable) - requested_bytes
        if reserved_bytes is not None:
            reserved_excess = prediction.reserved(is_expandable=is_expandable) - reserved_bytes
            excess = max(excess, reserved_excess)
        return Verdict(excess, excess)

    best = lower_until_accepted(plan, requested_bytes, plan_once, judge, cancel)
    if best.budget_bytes == requested_bytes:
        return best
    return replace(best, terms=replace(best.terms, requested_budget_bytes=requested_bytes))


def uses_expandable_segments() -> bool:
    """True if the environment configures torch's allocator to use expandable segments."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if match := re.search(r"expandable_segments:(\w+)", os.environ.get(name, "")):
            return match[1] == "True"
    return False
