"""The choice of the tensors to offload, for a step and a budget.

Of the steps with offloaded tensors (`offload_search`), up to two of the most promising are
solved in full, and one without recomputation if that may be faster. The plan without offloading is
returned where it is as fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.choice.declined import reason_to_decline, with_reason
from remat.choice.offload_search import CLOSE_SHARE, offloaded_forms
from remat.choice.offloadable_step import S, StepPlan, TraceStep
from remat.choice.offloaded_forms import (
    LEAST_GAIN,
    OffloadedForm,
    OffloadLimits,
    form_with_everything_offloaded,
    least_time_s,
    smallest_need_bytes,
)
from remat.choice.trace_plan import TracePlan
from remat.costs.link import Link
from remat.documents.trace import Trace
from remat.errors import GraphError, InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.passes.offload.copies import copy_times
from remat.passes.offload.earlier_reloads import with_earlier_reloads
from remat.plan import Plan
from remat.plan_data import (
    COPIES_S_STAT,
    HOST_BYTES_STAT,
    REQUESTED_GAP_STAT,
    TO_DEVICE_RATE_STAT,
    TO_HOST_RATE_STAT,
    WAITING_S_STAT,
    Status,
)
from remat.progress import Cancel
from remat.simulate import baseline_of, simulate

MAX_OPERATIONS = 10_000
"""The largest traces in which tensors are offloaded: a solve of larger ones takes minutes."""

_TOO_LARGE = f"the step has more than {MAX_OPERATIONS:,} operations"

_MAX_ATTEMPTS = 3
"""Rewritten traces that are solved in full, as long as none fits the budget."""

_MAX_PLANS = 2
"""Rewritten traces that are solved in full, at most, once one fits."""

_WORTHWHILE_GAIN = 0.01
"""Another trace is solved only if its guessed time is at least this share below the best plan's."""

_PEAK_TOLERANCE = 0.01
"""For the budget "min": a plan may exceed the smallest peak by this share if it is faster. Within
the smallest, where everything leaves the device, most copies are waited for."""

_LATE_COPIES_FACTOR = 1000.0
"""Where nothing else fits the budget, copies are placed for a link that is faster by this factor:
they take less memory, and the step waits for them."""


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
    `limit_s` end the choice early: no solve starts after that time. Raises the errors of
    `solve_without` if no plan with offloading fits the budget either.
    """
    graph = steps[0].graph()
    budget_bytes = budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)
    if budget_bytes is None:
        return _solve_smallest(limits, solve_in_full, solve_without, cancel, limit_s)
    deadline = time.monotonic() + limit_s
    solvable = [step for step in steps if len(step.graph()) <= MAX_OPERATIONS]
    choices = offloaded_forms(solvable, budget_bytes, limits, cancel, limit_s)
    offloaded = _best_plan(choices, budget, limits.link, solve_in_full, deadline)
    if _is_misjudged(choices, offloaded) and time.monotonic() < deadline:
        remaining_s = deadline - time.monotonic()
        choices = offloaded_forms(solvable, budget_bytes, limits, cancel, remaining_s, LEAST_GAIN)
        plans = [offloaded, _best_plan(choices, budget, limits.link, solve_in_full, deadline)]
        offloaded = min((p for p in plans if p), key=lambda p: p.plan.time_s, default=None)
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
            offloaded = _plan_with_late_copies(
                solvable, budget, budget_bytes, limits, solve_in_full, cancel, deadline, math.inf
            )
        if offloaded is None:
            raise
        return offloaded
    if offloaded is None and time.monotonic() < deadline:
        until_s = without.plan.time_s
        offloaded = _plan_with_late_copies(
            solvable, budget, budget_bytes, limits, solve_in_full, cancel, deadline, until_s
        )
    if offloaded is None or _is_as_fast(without.plan, offloaded.plan):
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


def _plan_with_late_copies(
    steps: Sequence[S],
    budget: Budget,
    budget_bytes: int,
    limits: OffloadLimits,
    solve_in_full: Callable[[S, Budget], Plan],
    cancel: Cancel | None,
    deadline: float,
    until_s: float,
) -> StepPlan[S] | None:
    """Return a plan for a budget that no plan with copies in time fits; None if there is none, or
    if waiting alone makes it slower than `until_s`.

    Copies back that start in time for a slow link take memory for long. These start late, and the
    step waits for them.
    """
    everything = [
        form
        for step in steps
        if smallest_need_bytes(step.graph()) <= budget_bytes
        and (form := form_with_everything_offloaded(step, limits)).score_s < until_s
    ]
    plan = _best_plan(everything, budget, limits.link, solve_in_full, deadline)
    if plan is not None and time.monotonic() < deadline:
        late = replace(limits, link=limits.link.scaled(_LATE_COPIES_FACTOR))
        limit_s = deadline - time.monotonic()
        forms = offloaded_forms(steps, budget_bytes, late, cancel, limit_s)
        faster = _best_plan(forms, budget, limits.link, solve_in_full, deadline)
        plan = min(plan, faster or plan, key=lambda plan: plan.plan.time_s)
    return plan


def _is_as_fast(without: Plan, offloaded: Plan) -> bool:
    return without.time_s <= offloaded.time_s + LEAST_GAIN * offloaded.baseline_time_s


def _solve_smallest(
    limits: OffloadLimits,
    solve_in_full: Callable[[S, Budget], Plan],
    solve_without: Callable[[], StepPlan[S]],
    cancel: Cancel | None,
    limit_s: float,
) -> StepPlan[S]:
    """Return the fastest plan that was found within 1% of the peak of the plan that offloads
    everything, and within the peak of the plan without offloading. It is not proved that there is
    no smaller peak."""
    without = solve_without()
    peak_bytes = without.plan.peak_bytes
    is_solvable = len(without.step.graph()) <= MAX_OPERATIONS
    forms = [form_with_everything_offloaded(without.step, limits)] if is_solvable else []
    deadline = time.monotonic() + limit_s
    smallest = _best_plan(forms, Budget.parse("min"), limits.link, solve_in_full, deadline)
    if smallest is not None and smallest.plan.peak_bytes >= peak_bytes:
        smallest = None
    size_bytes = peak_bytes
    if smallest is not None:
        size_bytes = min(peak_bytes, int((1 + _PEAK_TOLERANCE) * smallest.plan.peak_bytes))
    steps = (without.step,) if is_solvable else ()
    forms = offloaded_forms(steps, size_bytes, limits, cancel, deadline - time.monotonic())
    budget = Budget.parse(size_bytes)
    plans = [smallest, _best_plan(forms, budget, limits.link, solve_in_full, deadline)]
    offloaded = min((p for p in plans if p is not None), key=lambda p: p.plan.time_s, default=None)
    if offloaded is None or (
        peak_bytes <= size_bytes and _is_as_fast(without.plan, offloaded.plan)
    ):
        reason = "no faster plan with a peak as small was found" if is_solvable else _TOO_LARGE
        return with_reason(without, reason)
    return offloaded._replace(plan=replace(offloaded.plan, status=Status.FEASIBLE))


def _best_plan(
    choices: Sequence[OffloadedForm[S]],
    budget: Budget,
    link: Link,
    solve_in_full: Callable[[S, Budget], Plan],
    deadline: float,
) -> StepPlan[S] | None:
    """Return the fastest plan of the most promising choices that fit the budget, or that of a
    choice without recomputation if it is faster. No second choice is solved after the
    deadline."""

    def solve(choice: OffloadedForm[S]) -> StepPlan[S] | None:
        step = choice.step()
        try:
            plan = solve_in_full(step, budget)
            limit_bytes = plan.peak_bytes if is_smallest else plan.budget_bytes
            return _with_waiting(step, choice.bound_s, plan, limit_bytes, link)
        except InfeasibleBudget:
            infeasible.append(choice)
        except (SolverTimeout, GraphError):
            pass  # GraphError: published strategies do not know `Operation.same_copy_as`
        return None

    is_smallest = budget.size_bytes is None and budget.share is None
    plans: list[StepPlan[S]] = []
    tried: list[OffloadedForm[S]] = []
    best_s = math.inf
    infeasible: list[OffloadedForm[S]] = []
    for choice in choices:
        if any(choice.base is f.base and choice.free_share <= f.free_share for f in infeasible):
            continue  # one that leaves less memory free rarely fits where another did not
        if (
            len(tried) == _MAX_ATTEMPTS
            or len(plans) == _MAX_PLANS
            or choice.score_s > (1 - _WORTHWHILE_GAIN) * best_s
        ):
            break
        if tried and time.monotonic() > deadline:
            break
        tried.append(choice)
        if (plan := solve(choice)) is not None:
            plans.append(plan)
            best_s = min(best_s, plan.plan.time_s)
    others = (c for c in choices if not any(c is choice for choice in tried))
    retaining = min(others, key=lambda choice: choice.without_recompute_s, default=None)
    is_in_time = not tried or time.monotonic() <= deadline
    if retaining is not None and is_in_time and retaining.without_recompute_s < best_s:
        plans += [plan for plan in [solve(retaining)] if plan is not None]
    return min(plans, key=lambda plan: plan.plan.time_s, default=None)


def _with_waiting(
    step: S, order_bound_s: float, plan: Plan, limit_bytes: int, link: Link
) -> StepPlan[S]:
    """Return the plan of a step with the simulated waiting for copies as the cost of operations
    that wait, and the bound `order_bound_s` that holds whatever is offloaded. Copies back start
    earlier where that saves waiting and has room within `limit_bytes`."""
    earlier = with_earlier_reloads(step.graph(), plan.schedule, limit_bytes, link)
    if earlier is not plan.schedule:
        plan = step.with_schedule(plan, earlier) or plan
    schedule = plan.schedule
    times = copy_times(step.graph(), schedule.runs, link)
    waits_s = {wait.operation: wait.end_s - wait.start_s for wait in times.waits}
    step = step.with_waits(waits_s)
    graph = step.graph()
    timeline = simulate(graph, schedule)
    bound_s = min(order_bound_s, timeline.time_s)
    requested_gap = plan.stats.get(REQUESTED_GAP_STAT, 0.0)
    is_proved = timeline.time_s - bound_s <= float(requested_gap) * timeline.time_s
    changed = replace(
        plan,
        graph=graph,
        peak_bytes=timeline.peak_bytes,
        time_s=timeline.time_s,
        lower_bound=bound_s / plan.baseline_time_s - 1 if plan.baseline_time_s else 0.0,
        bound_scope="order",
        status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
        stats={
            **plan.stats,
            HOST_BYTES_STAT: times.largest_host_bytes,
            COPIES_S_STAT: times.copying_s,
            WAITING_S_STAT: times.waiting_s,
            TO_HOST_RATE_STAT: link.to_host_bytes_per_s,
            TO_DEVICE_RATE_STAT: link.to_device_bytes_per_s,
        },
    )
    return StepPlan(step, changed)
