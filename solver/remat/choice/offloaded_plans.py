"""The fastest plan of forms with offloaded tensors, or the reason why nothing is offloaded.

Up to two of the most promising forms are solved in full, and one without recomputation if that may
be faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from remat.choice.offloadable_step import FormSolver, OffloadableStep, S, StepPlan
from remat.choice.offloaded_forms import LEAST_GAIN, OffloadedForm
from remat.costs.devices import Link
from remat.errors import GraphError, InfeasibleBudget, SolverTimeout
from remat.graph import Graph
from remat.heuristics.local_search import smallest_peak_schedule
from remat.limits.units import format_bytes
from remat.passes.offload.copies import copy_times
from remat.passes.offload.shorter_waits import with_shorter_waits
from remat.plan import Plan
from remat.plan_data import OffloadFigures, Status
from remat.progress import Clock
from remat.simulate import simulate


def with_reason_not_offloaded(without: StepPlan[S], reason: str) -> StepPlan[S]:
    """Return a plan without offloading that records why nothing is offloaded."""
    declined = replace(without.plan.declined, not_offloaded=reason)
    return without._replace(plan=replace(without.plan, declined=declined))


def reason_not_offloaded(without: StepPlan[S], offloaded: Plan | None, min_bytes: int) -> str:
    """Return why a plan without offloading is taken. `offloaded` is the fastest plan with
    offloading, if there is one, and `min_bytes` the size of the smallest tensor that is
    offloaded."""
    if offloaded is not None:
        return f"no plan with offloading is faster than {offloaded.overhead:+.3%}"
    if len(without.plan.schedule) == len(without.plan.graph):
        return "the step fits the budget without recomputation"
    if not without.step.offloadable_values(min_bytes):
        return f"no tensor of {format_bytes(min_bytes)} or more can be on the host"
    return "no plan with offloading is within the budget"


_MAX_ATTEMPTS = 3
"""Rewritten traces that are solved in full, as long as none fits the budget."""

_MAX_PLANS = 2
"""Rewritten traces that are solved in full, at most, once one fits."""

_WORTHWHILE_GAIN = 0.01
"""Another trace is solved only if its guessed time is at least this share below the best plan's."""

_ROOM_SHARES = (1.0, 0.98, 0.95)
"""Shares of the budget within which copies of a solved schedule are moved, until torch's allocator
stays within the budget, too."""

_MIN_EVICTED_RUNS, _EVICTED_RUNS_PER_OPERATION = 2_000, 8
"""Operations that eviction may run to bring a graph within a budget, absolute or in multiples of
the graph's, whichever is more."""


def is_as_fast_without(without: Plan, offloaded: Plan) -> bool:
    """True unless the offloading of a plan saves `LEAST_GAIN` of the step's time."""
    return without.time_s <= offloaded.time_s + LEAST_GAIN * offloaded.baseline_time_s


def is_within_reach_of_eviction(graph: Graph, budget_bytes: int) -> bool:
    """True if a few attempts of eviction bring a graph within a budget.

    This is no proof, but takes a tenth of the time of a solve that finds nothing: 0.2 to 0.6 s
    instead of 3 to 6. The first attempt did it for all ten steps with offloaded tensors that a
    solve brought within 18% to 35% of the peak (models of `benchmarks.offloading`, 28 November
    2026); for the eleven that a solve did not, eight attempts did not either.
    """
    max_runs = max(_MIN_EVICTED_RUNS, _EVICTED_RUNS_PER_OPERATION * len(graph))
    smallest = smallest_peak_schedule(graph, target_bytes=budget_bytes, max_runs=max_runs)
    return smallest.peak_bytes <= budget_bytes


def best_offloaded_plan(
    choices: Sequence[OffloadedForm[S]],
    budget_bytes: int | None,
    link: Link,
    solver: FormSolver[S],
    clock: Clock,
) -> StepPlan[S] | None:
    """Return the fastest plan of the most promising choices that fit the budget (None: with the
    smallest peak), or the plan of a choice without recomputation if it is faster; None if no choice
    has a plan. Once `clock` is set, no second choice is solved."""

    def solve(choice: OffloadedForm[S]) -> StepPlan[S] | None:
        step = choice.step()
        if budget_bytes is not None and not is_within_reach_of_eviction(step.graph(), budget_bytes):
            infeasible.append(choice)
            return None
        try:
            plan = solver.solve(step, budget_bytes)
            limit_bytes = plan.peak_bytes if budget_bytes is None else plan.budget_bytes
            waiting = _plan_with_waits(step, choice.bound_s, plan, limit_bytes, link)
            solver.log.replace_plan(plan, waiting.plan)
            return waiting
        except InfeasibleBudget:
            infeasible.append(choice)
        except (SolverTimeout, GraphError):
            pass  # GraphError: published strategies do not know `Operation.same_copy_as`
        return None

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
        if tried and clock.is_set():
            break
        tried.append(choice)
        if (plan := solve(choice)) is not None:
            plans.append(plan)
            best_s = min(best_s, plan.plan.time_s)
    others = (c for c in choices if not any(c is choice for choice in tried))
    retaining = min(others, key=lambda choice: choice.without_recompute_s, default=None)
    is_in_time = not tried or not clock.is_set()
    if retaining is not None and is_in_time and retaining.without_recompute_s < best_s:
        plans += [plan for plan in [solve(retaining)] if plan is not None]
    return min(plans, key=lambda plan: plan.plan.time_s, default=None)


def _plan_with_waits(
    step: S, order_bound_s: float, plan: Plan, limit_bytes: int, link: Link
) -> StepPlan[S]:
    """Return the plan of a step with the simulated waiting for copies as the cost of operations
    that wait, and the bound `order_bound_s` that holds whatever is offloaded. Copies are moved
    where that saves waiting and has room within `limit_bytes`."""
    plan = _with_moved_copies(step, plan, limit_bytes, link)
    schedule = plan.schedule
    times = copy_times(step.graph(), schedule.runs, link)
    waits_s = {wait.operation: wait.end_s - wait.start_s for wait in times.waits}
    step = step.with_waits(waits_s)
    graph = step.graph()
    timeline = simulate(graph, schedule)
    bound_s = min(order_bound_s, timeline.time_s)
    requested_gap = plan.terms.requested_gap or 0.0
    is_proved = timeline.time_s - bound_s <= requested_gap * timeline.time_s
    changed = replace(
        plan,
        graph=graph,
        peak_bytes=timeline.peak_bytes,
        time_s=timeline.time_s,
        lower_bound=bound_s / plan.baseline_time_s - 1 if plan.baseline_time_s else 0.0,
        bound_scope="order",
        status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
        offload=OffloadFigures(
            host_bytes=times.largest_host_bytes,
            copies_s=times.copying_s,
            waiting_s=times.waiting_s,
            to_host_bytes_per_s=link.to_host_bytes_per_s,
            to_device_bytes_per_s=link.to_device_bytes_per_s,
        ),
    )
    return StepPlan(step, changed)


def _with_moved_copies(step: OffloadableStep, plan: Plan, limit_bytes: int, link: Link) -> Plan:
    """Return the plan with copies moved for shorter waits, unchanged if none can be moved. Where
    torch's allocator would then exceed the budget, they have less room."""
    for share in _ROOM_SHARES:
        moved = with_shorter_waits(step.graph(), plan.schedule, int(share * limit_bytes), link)
        if moved is plan.schedule:
            break
        if (changed := step.with_schedule(plan, moved)) is not None:
            return changed
    return plan
