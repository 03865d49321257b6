"""The choice of the tensors to offload, for a step and a budget.

The most promising steps with offloaded tensors (`offload_search`) are solved in full
(`offloaded_plans`). The plan without offloading is returned where it is as fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from remat.choice.late_copies import plan_with_late_copies
from remat.choice.offload_search import CLOSE_SHARE, offloaded_forms
from remat.choice.offload_smallest import solve_smallest
from remat.choice.offloadable_step import S, StepPlan, TraceStep
from remat.choice.offloaded_forms import (
    LEAST_GAIN,
    OffloadedForm,
    OffloadLimits,
    least_time_s,
)
from remat.choice.offloaded_plans import best_plan, is_as_fast, reason_to_decline, with_reason
from remat.choice.trace_plan import TracePlan
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel
from remat.simulate import baseline_of

MAX_OPERATIONS = 10_000
"""The largest traces in which tensors are offloaded: a solve of larger ones takes minutes."""

_LATE_COPIES_SHARE = 0.5
"""The share of the time limit that the search with late copies has, at least."""

_TOO_LARGE = f"the step has more than {MAX_OPERATIONS:,} operations"


def solve_with_offload(
    traces: Sequence[Trace],
    budget: Budget,
    limits: OffloadLimits,
    *,
    solve_in_full: Callable[[Trace, Budget], Plan],
    solve_without: Callable[[], TracePlan],
    cancel: Cancel | None = None,
    limit_s: float = math.inf,
) -> TracePlan:
    """Return the fastest plan of a trace, with tensors on the host or without: see
    `choose_offloading`."""

    def solve_step_without() -> StepPlan[TraceStep]:
        trace, plan = solve_without()
        return StepPlan(TraceStep(trace), plan)

    chosen = choose_offloading(
        [*map(TraceStep, traces)],
        budget,
        limits,
        solve_in_full=lambda step, budget: solve_in_full(step.trace, budget),
        solve_without=solve_step_without,
        cancel=cancel,
        limit_s=limit_s,
    )
    return TracePlan(chosen.step.trace, chosen.plan)


def choose_offloading(
    steps: Sequence[S],
    budget: Budget,
    limits: OffloadLimits,
    *,
    solve_in_full: Callable[[S, Budget], Plan],
    solve_without: Callable[[], StepPlan[S]],
    cancel: Cancel | None = None,
    limit_s: float = math.inf,
) -> StepPlan[S]:
    """Return the fastest plan, with tensors on the host or without.

    `steps` are forms of one measured step, such as whole and with operations split. Waiting for
    copies is part of the plan's time, as costs of the operations that wait. `solve_without` solves
    without offloading; it is not called if no such plan of `steps` can be faster. `cancel` and
    `limit_s` end the choice early: no solve starts after that time (half as much again for budgets
    that no copies in time fit). Raises the errors of
    `solve_without` if no plan with offloading fits the budget either. For "min", only the first of
    `steps` is solved.
    """
    graph = steps[0].graph()
    budget_bytes = budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)
    if budget_bytes is None:
        if len(graph) > MAX_OPERATIONS:
            return with_reason(solve_without(), _TOO_LARGE)
        return solve_smallest(steps[0], limits, solve_in_full, solve_without, cancel, limit_s)
    deadline = time.monotonic() + limit_s
    solvable = [step for step in steps if len(step.graph()) <= MAX_OPERATIONS]
    choices = offloaded_forms(solvable, budget_bytes, limits, cancel, limit_s)
    offloaded = best_plan(choices, budget, limits.link, solve_in_full, deadline)
    if _is_misjudged(choices, offloaded) and time.monotonic() < deadline:
        remaining_s = deadline - time.monotonic()
        choices = offloaded_forms(solvable, budget_bytes, limits, cancel, remaining_s, LEAST_GAIN)
        plans = [offloaded, best_plan(choices, budget, limits.link, solve_in_full, deadline)]
        offloaded = min((p for p in plans if p), key=lambda p: p.plan.time_s, default=None)
    if offloaded is None:
        until = max(deadline, time.monotonic() + _LATE_COPIES_SHARE * limit_s)
        offloaded = plan_with_late_copies(
            solvable, budget, budget_bytes, limits, solve_in_full, cancel, until
        )
    if (
        offloaded is not None
        and len(steps) == 1
        and offloaded.plan.time_s <= least_time_s(graph, budget_bytes, offloaded.plan.time_s)
    ):
        return offloaded
    try:
        without = solve_without()
    except (InfeasibleBudget, SolverTimeout):
        if offloaded is None:
            raise
        return offloaded
    if offloaded is None or is_as_fast(without.plan, offloaded.plan):
        best = None if offloaded is None else offloaded.plan
        reason = reason_to_decline(without, best, limits.min_bytes) if solvable else _TOO_LARGE
        return with_reason(without, reason)
    return offloaded


def _is_misjudged(choices: Sequence[OffloadedForm[S]], solved: StepPlan[S] | None) -> bool:
    """True if the search ended with a choice that is nearly as fast as the bound by its score, and
    the plan of the best choice is not."""
    if not choices or choices[0].score_s > (1 + CLOSE_SHARE) * choices[0].bound_s:
        return False
    return solved is None or solved.plan.time_s > (1 + 2 * CLOSE_SHARE) * choices[0].bound_s
