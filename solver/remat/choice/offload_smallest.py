"""The plan with the smallest peak where tensors may be offloaded: for the budget "min".

Everything is offloaded, which takes the least memory and waits for most copies. Then the fastest
plan within 1% of that peak is taken, with fewer tensors on the host or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from remat.choice.late_copies import plan_with_late_copies
from remat.choice.offload_search import offloaded_forms
from remat.choice.offloadable_step import S, StepPlan
from remat.choice.offloaded_forms import (
    OffloadLimits,
    form_with_everything_offloaded,
    least_time_s,
)
from remat.choice.offloaded_plans import best_plan, is_as_fast, is_within_reach, with_reason
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.plan_data import Status
from remat.progress import Cancel

_PEAK_TOLERANCE = 0.01
"""A plan may exceed the smallest peak by this share if it is faster, as in a solve for "min"
without offloading. Within the smallest, where everything leaves the device, most copies are waited
for."""

_NO_REASON = "no faster plan with a peak as small was found"


def solve_smallest(
    step: S,
    limits: OffloadLimits,
    solve_in_full: Callable[[S, Budget], Plan],
    solve_without: Callable[[], StepPlan[S]],
    cancel: Cancel | None,
    limit_s: float,
) -> StepPlan[S]:
    """Return the fastest plan that was found within 1% of the smallest peak, with offloading or
    without. It is not proved that there is no smaller peak.

    `solve_without` takes most of the time. It is called only if its plan may have a peak that is
    smaller by more than 1%, or may be the fastest.
    """
    graph, deadline = step.graph(), time.monotonic() + limit_s
    everything = [form_with_everything_offloaded(step, limits, overlaps=False)]
    smallest = best_plan(everything, Budget.parse("min"), limits.link, solve_in_full, deadline)
    without: StepPlan[S] | None = None
    least_bytes = peak_lower_bound_bytes(graph)  # of plans without offloading
    if smallest is None or smallest.plan.peak_bytes > _with_tolerance(least_bytes):
        without = solve_without()
        least_bytes = without.plan.peak_bytes
    if smallest is not None:
        least_bytes = min(least_bytes, smallest.plan.peak_bytes)
    limit_bytes = _with_tolerance(least_bytes)
    forms = offloaded_forms([step], limit_bytes, limits, cancel, deadline - time.monotonic())
    forms.append(form_with_everything_offloaded(step, limits, overlaps=True))
    budget = Budget.parse(limit_bytes)
    plans = [smallest, best_plan(forms, budget, limits.link, solve_in_full, deadline)]
    plans.append(
        plan_with_late_copies([step], budget, limit_bytes, limits, solve_in_full, cancel, deadline)
    )
    fitting = [p for p in plans if p is not None and p.plan.peak_bytes <= limit_bytes]
    offloaded = min(fitting, key=lambda p: p.plan.time_s, default=None)
    if (
        without is None
        and offloaded is not None
        and least_time_s(graph, limit_bytes, offloaded.plan.time_s) < offloaded.plan.time_s
        and is_within_reach(graph, limit_bytes)
    ):
        with suppress(InfeasibleBudget, SolverTimeout):
            without = solve_without()
    if without is None:
        assert offloaded is not None
    elif offloaded is None or (
        without.plan.peak_bytes <= limit_bytes and is_as_fast(without.plan, offloaded.plan)
    ):
        return with_reason(without, _NO_REASON)
    return offloaded._replace(plan=replace(offloaded.plan, status=Status.FEASIBLE))


def _with_tolerance(peak_bytes: int) -> int:
    return int((1 + _PEAK_TOLERANCE) * peak_bytes)
