"""Plans for steps that call a model several times before the backward.

A triplet loss, the discriminator of a GAN, a cell unrolled in time and pipeline parallelism run
`n` forwards before the first backward. While one call runs, the saved tensors of the other calls
stay in memory. With one schedule for all calls, a step needs (n - 1) * saved + peak bytes.

A limit on the saved bytes of a call divides the budget between the two terms. One call is solved
with the budget that (n - 1) times the limit leaves; a workspace at the boundary enforces the limit.
Quick solves search for the limit with the least time, for half of the time limit at most, and the
schedule for it is solved in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from remat.choice.plan_request import TracePlan
from remat.documents.records import BaselineRecord
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import PLAN_PARTS
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate
from remat.solution import Solution
from remat.solve import solve
from remat.strategies.auto import Auto
from remat.strategies.base import within_clock

_ESTIMATE = Auto(gap=0.1, peak_gap=0.1, time_limit=2.0)
"""The strategy of quick solves."""

_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits of the saved bytes that are tried, as shares of the largest one that may be useful."""

_ROUNDS = 2
"""The number of times that the interval around the best limit is halved."""

_WORKSPACES = (0.25, 0.5, 0.75, 1.0)
"""Workspaces that are tried for the smallest peak, as shares of one call's smallest peak."""

_SEARCH_SHARE = 0.5
"""The share of the time that is left for quick solves, and for the first of two full ones."""

Solve = Callable[[Trace, Budget, Clock], TracePlan]
"""Solves a step within a budget and a time limit; raises `InfeasibleBudget`."""


def plan_calls_in_flight(
    trace: Trace, budget: Budget, in_flight: int, solve: Solve, clock: Clock
) -> TracePlan:
    """Return the fastest plan for a model that is called `in_flight` times before a backward.

    The budget is for all calls together; a percentage is relative to their peak without
    recomputation. The plan's graph counts the saved tensors and inputs of the other calls as
    constant memory. All solves end with `clock`. Raises `InfeasibleBudget` with the smallest peak
    among the plans that the search found.
    """
    search = _InFlightSearch(trace, in_flight, solve, clock)
    budget_bytes = budget.in_bytes(search.baseline_bytes, trace.library_bytes)
    if budget_bytes is None:
        return search.smallest()
    best = search.fastest(budget_bytes)
    if best is not None:
        return best
    smallest = search.smallest()
    smallest_bytes = smallest.plan.peak_bytes
    if smallest_bytes <= budget_bytes:  # the search above tries other limits
        return TracePlan(smallest.trace, replace(smallest.plan, budget_bytes=budget_bytes))
    raise InfeasibleBudget(
        f"no plan within {format_bytes(budget_bytes)} was found for {in_flight} calls of the "
        "model before a backward: the saved tensors of all calls are in memory at once. The "
        f"smallest peak found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes). Pass a "
        'budget of at least that or "min", make the batch smaller, call the model once with '
        "all inputs concatenated, or, if some of these calls have no backward, run them under "
        "torch.no_grad()",
        min_feasible_bytes=smallest_bytes,
    )


class _InFlightSearch:
    """A search over limits on the bytes that each call saves. Sizes are in bytes."""

    def __init__(self, trace: Trace, in_flight: int, solve: Solve, clock: Clock) -> None:
        self._clock = clock
        self._trace = trace
        self._others = in_flight - 1
        self._in_flight = in_flight
        self._solve = solve
        graph = trace.graph()
        self._constant = graph.constant_bytes
        inputs = {p.storage for p in trace.placeholders if p.kind == "input"}
        self._inputs = sum(trace.allocated_bytes(storage) for storage in inputs)
        assert graph.boundary is not None
        tangents = graph.operations[graph.boundary].outputs
        self._tangents = sum(graph.values[value].size_bytes for value in tangents)
        timeline = simulate(graph, Schedule.keep_all(graph))
        self._largest_saved = _saved_at_boundary_bytes(
            graph.boundary, Schedule.keep_all(graph), timeline, self._constant
        )
        others_bytes = self._others * (self._largest_saved + self._inputs)
        self.baseline_bytes = timeline.peak_bytes + others_bytes
        self._baseline_s = timeline.time_s if graph.unsplit is None else graph.unsplit.time_s

    def fastest(self, budget: int) -> TracePlan | None:
        """Return the fastest plan within a budget; None if no plan was found.

        Quick solves rank the limits on saved bytes, and the best one is solved in full: the next
        one if that has no plan.
        """
        is_enough = budget >= self.baseline_bytes
        ranked = [self._largest_saved] if is_enough else self._ranked_limits(self._trace, budget)
        plans = (
            self._plan_within_limit(self._trace, budget, limit, self._solve_in_full)
            for limit in ranked
        )
        return next((plan for plan in plans if plan is not None), None)

    def smallest(self) -> TracePlan:
        """Return the plan with the smallest peak that quick solves find.

        Candidates are the step as it is, and the step with the operations split that the smallest
        peak of one call needs split.
        """
        half = self._clock.limited_to_share(_SEARCH_SHARE)
        split = self._solve(self._trace, Budget.parse("min"), half).trace
        traces = [self._trace] if split is self._trace else [self._trace, split]
        estimates = [self._smallest_estimate(trace) for trace in traces]
        place = min(range(len(traces)), key=lambda i: estimates[i].plan.peak_bytes)
        estimate, trace = estimates[place], traces[place]
        limits_bytes = estimate.plan.peak_bytes, self._saved_by_call(estimate)
        solved = self._plan_within_limit(trace, *limits_bytes, self._solve_in_full)
        return estimate if solved is None else solved

    def _solve_in_full(self, trace: Trace, budget: Budget) -> TracePlan:
        """Return the plan of a solve within the time that is left."""
        return self._solve(trace, budget, self._clock)

    def _estimate(self, trace: Trace, budget: Budget) -> TracePlan:
        """Return the plan of a quick solve of the step as it is."""
        strategy = within_clock(_ESTIMATE, self._clock, _SEARCH_SHARE)
        cancel = self._clock.without_limit()
        return TracePlan(trace, solve(trace, budget, strategy, cancel=cancel))

    def _smallest_estimate(self, trace: Trace) -> TracePlan:
        """Return the plan with the smallest peak of all calls that quick solves find.

        Solves for the smallest peak of one call, with several workspaces at the boundary. Without
        a workspace, only the peak counts; the larger the workspace, the fewer bytes a call saves.
        """
        single = self._estimate(trace, Budget.parse("min"))
        plans = [self._with_other_calls(single, None)]
        search_clock = self._clock.limited_to_share(_SEARCH_SHARE)
        for share in _WORKSPACES:
            if search_clock.is_set():
                break
            workspace = int(share * (single.plan.peak_bytes - self._constant))
            limited = trace.replace(boundary_bytes=workspace)
            plans.append(self._with_other_calls(self._estimate(limited, Budget.parse("min")), None))
        return min(plans, key=lambda plan: plan.plan.peak_bytes)

    def _largest_limit(self, budget: int) -> int:
        """Return the largest limit on the bytes that each call saves, for which all calls fit the
        budget; 0 or less if there is none."""
        available = budget - self._constant - self._tangents - self._others * self._inputs
        return available // self._in_flight

    def _ranked_limits(self, trace: Trace, budget: int) -> list[int]:
        """Return limits on the saved bytes, sorted by the time of their quick solves. Limits
        without a plan come last. Empty if the calls do not fit the budget, whatever they save."""
        largest = self._largest_limit(budget)
        if largest <= 0:
            return []
        times: dict[int, float] = {}
        search_clock = self._clock.limited_to_share(_SEARCH_SHARE)
        for share in _SHARES:
            if times and search_clock.is_set():
                break
            self._estimate_times(trace, budget, int(share * largest), times)
        for _ in range(_ROUNDS):
            if search_clock.is_set():
                break
            limits = sorted(times)
            place = limits.index(min(times, key=times.__getitem__))
            if times[limits[place]] == math.inf:
                break
            for neighbour in (*limits[max(place - 1, 0) : place], *limits[place + 1 : place + 2]):
                self._estimate_times(trace, budget, (limits[place] + neighbour) // 2, times)
        return sorted(times, key=times.__getitem__)

    def _estimate_times(
        self, trace: Trace, budget: int, limit: int, times: dict[int, float]
    ) -> None:
        """Add the time of a quick solve at a limit to `times`, infinity if there is no plan.

        If its plan saves fewer bytes than the limit, repeat with these bytes as the limit: the
        other calls then need less memory, so each call may use more.
        """
        while limit not in times:
            plan = self._plan_within_limit(trace, budget, limit, self._estimate)
            if plan is None:
                times[limit] = math.inf
                return
            times[limit] = plan.plan.time_s
            limit = min(limit, self._saved_by_call(plan))

    def _plan_within_limit(
        self,
        trace: Trace,
        budget: int,
        limit: int,
        solve: Callable[[Trace, Budget], TracePlan],
    ) -> TracePlan | None:
        """Return a plan by `solve` for a budget of all calls, each of which saves at most `limit`
        bytes; None if there is no such plan."""
        available = budget - self._others * (limit + self._inputs)
        workspace = available - self._constant - limit - self._tangents
        if workspace < 0:
            return None
        try:
            solved = solve(trace.replace(boundary_bytes=workspace), Budget.parse(available))
        except (InfeasibleBudget, SolverTimeout):
            return None
        return self._with_other_calls(solved, budget)

    def _with_other_calls(self, solved: TracePlan, budget: int | None) -> TracePlan:
        """Return the plan with the memory of the other calls added to its graph. If `budget` is
        None, the plan's budget is its peak."""
        schedule = solved.plan.schedule
        trace = solved.trace.replace(boundary_bytes=0)
        others_bytes = self._others * (self._saved_by_call(solved) + self._inputs)
        trace = trace.replace(
            external_bytes=trace.external_bytes + others_bytes,
            unsplit=BaselineRecord(peak_bytes=self.baseline_bytes, time_s=self._baseline_s),
        )
        graph = trace.graph()
        if budget is None:
            budget = simulate(graph, schedule).peak_bytes
        plan = Plan.of(graph, budget, Solution(schedule), solved.plan.solve)
        parts = {name: getattr(solved.plan, name) for name in (*PLAN_PARTS, "candidates")}
        return TracePlan(trace, replace(plan, **parts))

    @staticmethod
    def _saved_by_call(solved: TracePlan) -> int:
        """Return the bytes that each call of the plan saves between its forward and its
        backward."""
        graph, schedule = solved.trace.replace(boundary_bytes=0).graph(), solved.plan.schedule
        return _saved_at_boundary_bytes(
            graph.boundary, schedule, simulate(graph, schedule), graph.constant_bytes
        )


def _saved_at_boundary_bytes(
    boundary: int | None, schedule: Schedule, timeline: Timeline, constant_bytes: int
) -> int:
    """Return the bytes live between the forward and the backward of a schedule, without constant
    memory."""
    assert boundary is not None
    return timeline.before_bytes[schedule.runs.index(boundary)] - constant_bytes
