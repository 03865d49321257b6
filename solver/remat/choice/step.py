"""`plan_step`: the plan of a measured step that answers a `PlanRequest`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from remat.choice.candidates import MAX_PIECE_NODES, plan_best_candidate, split_rounds
from remat.choice.in_flight import plan_calls_in_flight
from remat.choice.offload import choose_offloading
from remat.choice.offloadable_step import StepPlan, TraceStep
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.offloaded_plans import with_reason_not_offloaded
from remat.choice.plan_request import (
    FormPlanner,
    PlanRequest,
    TracePlan,
    TraceSolver,
)
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.heuristics.peak_bounds import end_bytes, peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.limits.limits import Limits, plan_or_smallest
from remat.limits.options import PIECES
from remat.limits.units import format_bytes
from remat.passes.split.splits import split_largest_operations
from remat.plan import Plan
from remat.plan_data import with_reserve
from remat.progress import Cancel, Clock, ProgressCallback, is_cancelled
from remat.schedule import Schedule
from remat.simulate import budget_in_bytes
from remat.solve import solve
from remat.strategies.base import Strategy

_HINT_AT_END = (
    "The gradients and results at the end of the step need {}. Splitting and offloading do not "
    'reduce that, so neither was tried. Pass "min" for the smallest peak with both'
)

_HINT_OFFLOADED = (
    "These are bytes without offloading; no plan with it was found within the budget either, but "
    '"min" takes the smallest peak with it, which may be below them'
)

_HINT_WHOLE = (
    'That is with whole operations; split="auto" may fit the budget: it runs the largest '
    "operations in pieces"
)


def plan_step(
    trace: Trace,
    request: PlanRequest,
    *,
    measure: Callable[[Trace], Trace],
    plan_form: FormPlanner | None = None,
    plan_without: Callable[[], TracePlan] | None = None,
    clock: Clock | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> TracePlan:
    """Return the plan of a measured trace that answers a request, with the trace that it is for.

    `measure` adds costs to the operations of a split trace that have none. `plan_form` replaces
    `remat.solve`, for plans that another process solves. `plan_without` replaces the solve without
    offloading, for callers that have its plan or error. `clock` replaces the time limit of all
    solves together; each then has the limit of the strategy, too. Raises the errors of
    `remat.solve`; the smallest feasible budget that they name includes the request's reserve.
    """
    limits = request.limits

    def plan_here(form: Trace, budget: Budget, strategy: Strategy, start: Schedule | None) -> Plan:
        return solve(
            form,
            budget,
            strategy,
            progress=progress,
            cancel=cancel,
            reserved_bytes=limits.segments_bytes,
            start=start,
        )

    def fastest_plan(step: Trace, budget: Budget, clock: Clock) -> TracePlan:
        solver = TraceSolver(
            request,
            budget,
            budget_in_bytes(step.graph(), budget),
            clock,
            plan_form or plan_here,
            measure,
        )
        chosen = _fastest_plan_of_step(TraceStep(step), request, solver, plan_without)
        is_min = solver.budget_bytes is None
        candidates = solver.log.results(chosen.plan, is_min=is_min)
        return TracePlan(chosen.step.trace, replace(chosen.plan, candidates=candidates))

    def plan_within(budget: Budget) -> TracePlan:
        limit = clock or request.clock(cancel)
        if request.in_flight > 1:
            return plan_calls_in_flight(trace, budget, request.in_flight, fastest_plan, limit)
        return fastest_plan(trace, budget, limit)

    try:
        with limits.infeasible_with_reserve():
            chosen = plan_or_smallest(
                plan_within,
                limits.budget_after_reserve,
                request.infeasible,
                peak_bytes=lambda chosen: chosen.plan.peak_bytes + limits.reserve_bytes,
                requested=limits.budget,
            )
        return chosen._replace(plan=with_reserve(chosen.plan, limits.reserve_bytes))
    except InfeasibleBudget as error:
        if request.pieces or split_largest_operations(trace, min(PIECES), MAX_PIECE_NODES) is trace:
            raise
        raise error.with_hint(_HINT_WHOLE) from None


def sweep_with_offload(
    trace: Trace,
    budgets: Iterable[Budget],
    strategy: Strategy,
    offload: OffloadLimits,
    plans_without: Sequence[Plan],
    *,
    on_plan: Callable[[], None],
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> list[Plan]:
    """Return the fastest plan for each budget, smallest budget first; each may offload or not.

    `plans_without` are the plans of a sweep that offloads nothing. They are returned for "min",
    whose search for a smaller peak would take minutes, and for the budgets that are left once
    `cancel` is set. Budgets below the first that is infeasible are left out. The strategy's time
    limit applies to each solve. `on_plan` is called after each plan.
    """
    sizes = {budget_in_bytes(trace.graph(), budget) for budget in budgets}
    # torch's allocator may have lowered `budget_bytes`.
    by_budget = {plan.requested_budget_bytes: plan for plan in plans_without}
    plans = dict(by_budget)

    def plan_without(size_bytes: int) -> TracePlan:
        if size_bytes not in by_budget:
            raise SolverTimeout("the sweep without offloading has no plan for this budget")
        return TracePlan(trace, by_budget[size_bytes])

    for size_bytes in sorted((size for size in sizes if size is not None), reverse=True):
        try:
            chosen = plan_step(
                trace,
                PlanRequest(Limits(Budget.parse(size_bytes)), strategy, offload=offload),
                measure=lambda split: split,
                plan_without=lambda size_bytes=size_bytes: plan_without(size_bytes),
                clock=Clock.of(math.inf, cancel),
                progress=progress,
                cancel=cancel,
            )
        except RematError as error:
            if is_cancelled(cancel) or isinstance(error, InfeasibleBudget | SolverTimeout):
                break
            raise
        plans[size_bytes] = chosen.plan
        on_plan()
        if is_cancelled(cancel):
            break
    return [plans[size_bytes] for size_bytes in sorted(plans)]


def _fastest_plan_of_step(
    step: TraceStep,
    request: PlanRequest,
    solver: TraceSolver,
    plan_without: Callable[[], TracePlan] | None,
) -> StepPlan[TraceStep]:
    """Return the fastest plan of a step within the solver's budget, with pieces and offloaded
    tensors as the request allows. `plan_without`, if passed, replaces the solve without
    offloading."""

    def plan_without_offload() -> StepPlan[TraceStep]:
        if plan_without is None:
            return plan_best_candidate(step, request, solver)
        chosen = plan_without()
        return StepPlan(TraceStep(chosen.trace), chosen.plan)

    offload, budget_bytes = request.offload, solver.budget_bytes
    at_end_bytes = end_bytes(step.graph())
    if request.choices and budget_bytes is not None and budget_bytes < at_end_bytes:
        try:
            return StepPlan(step, solver.solve(step, budget_bytes))
        except InfeasibleBudget as error:
            size = f"{format_bytes(at_end_bytes)} ({at_end_bytes:,} bytes)"
            raise error.with_hint(_HINT_AT_END.format(size)) from None
    if offload is None:
        return plan_without_offload()
    if offload.host_bytes == 0:
        return with_reason_not_offloaded(plan_without_offload(), "the host budget is 0")
    steps, chosen_without = [step], plan_without_offload
    if request.pieces:
        try:
            chosen = plan_without_offload()
        except (InfeasibleBudget, SolverTimeout) as error:
            steps += _split_until_operations_fit(step, max(request.pieces), solver)
            chosen_without = _plan_function_raising(error)
        else:
            steps = [step] if chosen.step.trace is step.trace else [chosen.step, step]
            chosen_without = _plan_function_returning(chosen)
    try:
        return choose_offloading(steps, budget_bytes, offload, solver, chosen_without)
    except InfeasibleBudget as error:
        raise error.with_hint(_HINT_OFFLOADED) from None


def _plan_function_returning(chosen: StepPlan[TraceStep]) -> Callable[[], StepPlan[TraceStep]]:
    """Return a function that returns this plan, for `choose_offloading`."""
    return lambda: chosen


def _plan_function_raising(error: Exception) -> Callable[[], StepPlan[TraceStep]]:
    """Return a function that raises this error, for `choose_offloading`."""

    def raise_error() -> StepPlan[TraceStep]:
        raise error

    return raise_error


def _split_until_operations_fit(
    step: TraceStep, pieces: int, solver: TraceSolver
) -> list[TraceStep]:
    """Return a list of the step with its largest operations split until each fits the budget; empty
    if that cannot be reached, or is so already, or for "min"."""
    budget_bytes = solver.budget_bytes
    if budget_bytes is None or peak_lower_bound_bytes(step.graph()) <= budget_bytes:
        return []
    for split in split_rounds(step.trace, pieces, solver.measure):
        if peak_lower_bound_bytes(split.graph()) <= budget_bytes:
            return [TraceStep(split)]
    return []
