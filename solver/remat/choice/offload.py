"""The choice of the tensors to offload, for a step and a budget.

The most promising steps with offloaded tensors (`offload_search`) are solved in full
(`offloaded_plans`). The plan without offloading is returned where it is as fast.

For the budget "min", everything is offloaded first, which takes the least memory and waits for most
copies. Then the fastest plan within 1% of that peak is taken, with fewer tensors on the host or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from remat.choice.late_copies import plan_with_late_copies
from remat.choice.offload_search import CLOSE_SHARE, offloaded_forms
from remat.choice.offloadable_step import FormSolver, S, StepPlan
from remat.choice.offloaded_forms import (
    LEAST_GAIN,
    OffloadedForm,
    OffloadLimits,
    form_with_everything_offloaded,
    least_time_s,
)
from remat.choice.offloaded_plans import (
    best_offloaded_plan,
    is_as_fast_without,
    is_within_reach_of_eviction,
    reason_not_offloaded,
    with_reason_not_offloaded,
)
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.plan_data import Status
from remat.progress import Clock

MAX_OPERATIONS = 10_000
"""The largest traces in which tensors are offloaded: a solve of larger ones takes minutes."""

_LATE_COPIES_SHARE = 0.5
"""The share of the time limit that the search with late copies has, at least."""

_TOO_LARGE = f"the step has more than {MAX_OPERATIONS:,} operations"

_PEAK_TOLERANCE = 0.01
"""For "min", a plan may exceed the smallest peak by this share if it is faster, as in a solve
without offloading. Within the smallest, where everything leaves the device, most copies are waited
for."""

_NO_FASTER_PLAN = "no faster plan with a peak as small was found"


def choose_offloading(
    steps: Sequence[S],
    budget_bytes: int | None,
    limits: OffloadLimits,
    solver: FormSolver[S],
    plan_without: Callable[[], StepPlan[S]],
) -> StepPlan[S]:
    """Return the fastest plan within a budget, with tensors on the host or without; if the budget
    is None, the plan with the smallest peak.

    `steps` are forms of one measured step, such as whole and with operations split. Waiting for
    copies is part of the plan's time, as costs of the operations that wait. `plan_without` solves
    without offloading; it is not called if no such plan of `steps` can be faster. No solve starts
    after the solver's time limit of a choice (half as much again for budgets that no copies in time
    fit). Raises the errors of `plan_without` if no plan with offloading fits the budget either.
    For the smallest peak, only the first of `steps` is solved.
    """
    clock = solver.clock.limited_to(solver.choice_limit_s)
    graph = steps[0].graph()
    if budget_bytes is None:
        if len(graph) > MAX_OPERATIONS:
            return with_reason_not_offloaded(plan_without(), _TOO_LARGE)
        return _choose_offloading_for_min(steps[0], limits, solver, plan_without, clock)
    solvable = [step for step in steps if len(step.graph()) <= MAX_OPERATIONS]
    choices = offloaded_forms(solvable, budget_bytes, limits, clock)
    offloaded = best_offloaded_plan(choices, budget_bytes, limits.link, solver, clock)
    if _is_best_form_misjudged(choices, offloaded) and not clock.is_set():
        choices = offloaded_forms(solvable, budget_bytes, limits, clock, LEAST_GAIN)
        plans = [offloaded, best_offloaded_plan(choices, budget_bytes, limits.link, solver, clock)]
        offloaded = min((p for p in plans if p), key=lambda p: p.plan.time_s, default=None)
    if offloaded is None:
        late_s = max(clock.remaining_s, _LATE_COPIES_SHARE * solver.choice_limit_s)
        late_clock = solver.clock.limited_to(late_s)
        offloaded = plan_with_late_copies(solvable, budget_bytes, limits, solver, late_clock)
    if (
        offloaded is not None
        and len(steps) == 1
        and offloaded.plan.time_s <= least_time_s(graph, budget_bytes, offloaded.plan.time_s)
    ):
        return offloaded
    try:
        without = plan_without()
    except (InfeasibleBudget, SolverTimeout):
        if offloaded is None:
            raise
        return offloaded
    if offloaded is None or is_as_fast_without(without.plan, offloaded.plan):
        best = None if offloaded is None else offloaded.plan
        reason = reason_not_offloaded(without, best, limits.min_bytes) if solvable else _TOO_LARGE
        return with_reason_not_offloaded(without, reason)
    return offloaded


def _is_best_form_misjudged(
    choices: Sequence[OffloadedForm[S]], solved: StepPlan[S] | None
) -> bool:
    """True if the best of these forms is nearly as fast as the bound by its score, so that the
    search ended with it, and `solved`, its plan, is not, or is missing."""
    if not choices or choices[0].score_s > (1 + CLOSE_SHARE) * choices[0].bound_s:
        return False
    return solved is None or solved.plan.time_s > (1 + 2 * CLOSE_SHARE) * choices[0].bound_s


def _choose_offloading_for_min(
    step: S,
    limits: OffloadLimits,
    solver: FormSolver[S],
    plan_without: Callable[[], StepPlan[S]],
    clock: Clock,
) -> StepPlan[S]:
    """Return the fastest plan that was found within 1% of the smallest peak, with offloading or
    without. It is not proved that there is no smaller peak.

    `plan_without` takes most of the time. It is called only if its plan may have a peak that is
    smaller by more than 1%, or may be the fastest.
    """
    graph = step.graph()
    everything = [form_with_everything_offloaded(step, limits, overlaps=False)]
    smallest = best_offloaded_plan(everything, None, limits.link, solver, clock)
    without: StepPlan[S] | None = None
    least_bytes = peak_lower_bound_bytes(graph)  # of plans without offloading
    if smallest is None or smallest.plan.peak_bytes > _peak_with_tolerance_bytes(least_bytes):
        without = plan_without()
        least_bytes = without.plan.peak_bytes
    if smallest is not None:
        least_bytes = min(least_bytes, smallest.plan.peak_bytes)
    limit_bytes = _peak_with_tolerance_bytes(least_bytes)
    forms = offloaded_forms([step], limit_bytes, limits, clock)
    forms.append(form_with_everything_offloaded(step, limits, overlaps=True))
    plans = [smallest, best_offloaded_plan(forms, limit_bytes, limits.link, solver, clock)]
    plans.append(plan_with_late_copies([step], limit_bytes, limits, solver, clock))
    fitting = [p for p in plans if p is not None and p.plan.peak_bytes <= limit_bytes]
    offloaded = min(fitting, key=lambda p: p.plan.time_s, default=None)
    if (
        without is None
        and offloaded is not None
        and least_time_s(graph, limit_bytes, offloaded.plan.time_s) < offloaded.plan.time_s
        and is_within_reach_of_eviction(graph, limit_bytes)
    ):
        with suppress(InfeasibleBudget, SolverTimeout):
            without = plan_without()
    if without is None:
        assert offloaded is not None
    elif offloaded is None or (
        without.plan.peak_bytes <= limit_bytes and is_as_fast_without(without.plan, offloaded.plan)
    ):
        return with_reason_not_offloaded(without, _NO_FASTER_PLAN)
    return offloaded._replace(plan=replace(offloaded.plan, status=Status.FEASIBLE))


def _peak_with_tolerance_bytes(peak_bytes: int) -> int:
    """Return the largest peak that "min" accepts, given the smallest one."""
    return int((1 + _PEAK_TOLERANCE) * peak_bytes)
