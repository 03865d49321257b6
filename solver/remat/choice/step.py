"""`plan_step`: the plan of a measured step that answers a `PlanRequest`.

`solve_step` chooses what is split and offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from remat.choice.offload import solve_with_offload
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest, StepClock
from remat.choice.split import CHOICE_LIMIT_S, MAX_PIECE_NODES, solve_with_splits
from remat.choice.trace_plan import TracePlan
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.heuristics.peak_bounds import end_bytes, peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.limits.infeasible import plan_or_smallest
from remat.limits.options import PIECES
from remat.limits.units import format_bytes
from remat.passes.split.obstacle import split_obstacle
from remat.passes.split.splits import split_largest_operations
from remat.plan import Plan
from remat.plan_data import with_reserve
from remat.progress import Cancel, ProgressCallback
from remat.simulate import baseline_of
from remat.solve import solve

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

_MAX_ROUNDS = 4
"""The maximum number of times that the largest operations are split to reach a budget."""


def solve_step(
    trace: Trace,
    budget: Budget,
    *,
    pieces: tuple[int, ...],
    offload: OffloadLimits | None,
    solve_in_full: Callable[[Trace, Budget], Plan],
    measure: Callable[[Trace], Trace],
    cancel: Cancel | None = None,
    limit_s: float = CHOICE_LIMIT_S,
    solve_without: Callable[[], TracePlan] | None = None,
) -> TracePlan:
    """Return the fastest plan of a measured trace within a budget, which says why the logits are
    not split, if it has extra time and they cannot be.

    Operations may be split into one of these numbers of `pieces`, to which `measure` adds costs,
    and tensors offloaded within the limits of `offload`: () splits nothing, None offloads nothing.
    `cancel` ends the choices early, and each of them ends after `limit_s`. `solve_without`
    replaces the solve without offloading, for callers that have its plan or error. Raises the
    errors of `solve_in_full`.
    """

    def solve_without_offload() -> TracePlan:
        try:
            chosen = solve_in_pieces()
        except InfeasibleBudget as error:
            obstacle = split_obstacle(trace) if pieces else ""
            if not obstacle:
                raise
            raise error.with_hint(obstacle) from None
        plan = chosen.plan
        if pieces and plan.overhead > 0 and (obstacle := split_obstacle(trace)):
            plan = replace(plan, declined=replace(plan.declined, not_split=obstacle))
        return chosen._replace(plan=plan)

    def solve_in_pieces() -> TracePlan:
        if solve_without is not None:
            return solve_without()
        if not pieces:
            return TracePlan(trace, solve_in_full(trace, budget))
        return solve_with_splits(
            trace,
            budget,
            pieces,
            solve_in_full=lambda split: solve_in_full(split, budget),
            measure=measure,
            cancel=cancel,
            limit_s=limit_s,
        )

    if _exceeds_at_end(trace, budget):
        try:
            return TracePlan(trace, solve_in_full(trace, budget))
        except InfeasibleBudget as error:
            if not pieces and offload is None:
                raise
            raise error.with_hint(_HINT_AT_END.format(_size_at_end(trace))) from None
    if offload is None:
        return solve_without_offload()
    if offload.host_bytes == 0:
        chosen = solve_without_offload()
        declined = replace(chosen.plan.declined, not_offloaded="the host budget is 0")
        return chosen._replace(plan=replace(chosen.plan, declined=declined))
    traces, chosen_without = (trace,), solve_without_offload
    if pieces:
        try:
            chosen = solve_without_offload()
        except (InfeasibleBudget, SolverTimeout) as error:
            traces = (trace, *_split_until_operations_fit(trace, budget, max(pieces), measure))
            chosen_without = _raising(error)
        else:
            traces = (chosen.trace,) if chosen.trace is trace else (chosen.trace, trace)
            chosen_without = _returning(chosen)
    try:
        return solve_with_offload(
            traces,
            budget,
            offload,
            solve_in_full=solve_in_full,
            solve_without=chosen_without,
            cancel=cancel,
            limit_s=limit_s,
        )
    except InfeasibleBudget as error:
        raise error.with_hint(_HINT_OFFLOADED) from None


SolveStep = Callable[[Trace, Budget, StepClock], Plan]
"""Solves a step in one form within a budget, and within the time that the clock gives."""


def plan_step(
    trace: Trace,
    request: PlanRequest,
    *,
    measure: Callable[[Trace], Trace],
    solve_in_full: SolveStep | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> TracePlan:
    """Return the plan of a measured trace that answers a request, with the trace that it is for.

    `measure` adds costs to the operations of a split trace that have none. `solve_in_full` replaces
    `remat.solve`, for plans that another process solves. Raises the errors of `remat.solve`; the
    smallest feasible budget that they name includes the request's reserve.
    """
    limits, strategy = request.limits, request.strategy

    def solve_here(step: Trace, budget: Budget, clock: StepClock) -> Plan:
        return solve(
            step,
            budget,
            clock.next_strategy(),
            progress=progress,
            cancel=cancel,
            reserved_bytes=request.segments_bytes,
        )

    def plan_within(budget: Budget) -> TracePlan:
        choices = bool(request.pieces) + (request.offload is not None)
        clock = StepClock.of(strategy, choices, cancel)
        return solve_step(
            trace,
            budget,
            pieces=request.pieces,
            offload=request.offload,
            solve_in_full=lambda step, budget: (solve_in_full or solve_here)(step, budget, clock),
            measure=measure,
            cancel=clock,
            limit_s=clock.choice_limit_s,
        )

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


def _exceeds_at_end(trace: Trace, budget: Budget) -> bool:
    """True if the gradients and the other results alone are more than the budget: no pieces and no
    copies change that."""
    graph = trace.graph()
    budget_bytes = budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)
    return budget_bytes is not None and budget_bytes < end_bytes(graph)


def _size_at_end(trace: Trace) -> str:
    """Return the bytes at the end of the step (results and constant memory) as text."""
    size_bytes = end_bytes(trace.graph())
    return f"{format_bytes(size_bytes)} ({size_bytes:,} bytes)"


def _returning(chosen: TracePlan) -> Callable[[], TracePlan]:
    return lambda: chosen


def _raising(error: Exception) -> Callable[[], TracePlan]:
    def raise_error() -> TracePlan:
        raise error

    return raise_error


def _split_until_operations_fit(
    trace: Trace, budget: Budget, pieces: int, measure: Callable[[Trace], Trace]
) -> tuple[Trace, ...]:
    """Return the trace with its largest operations split until each fits the budget; none if that
    cannot be reached, or is so already."""
    graph = trace.graph()
    budget_bytes = budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)
    if budget_bytes is None:
        return ()
    split = trace
    for _ in range(_MAX_ROUNDS):
        if peak_lower_bound_bytes(split.graph()) <= budget_bytes:
            break
        smaller = split_largest_operations(split, pieces, MAX_PIECE_NODES)
        if smaller is split:
            return ()
        split = measure(smaller)
    return () if split is trace else (split,)
