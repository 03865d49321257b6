"""Plans for steps that call a model several times before the backward.

A triplet loss, the discriminator of a GAN, a cell unrolled in time and pipeline parallelism run
`n` forwards before the first backward. While one call runs, each of the others holds what it saves,
so the memory of a step is (n - 1) saved + peak, with one schedule for all calls.

The two terms are divided by a limit of what a call may save: calls are solved with the rest of the
budget, and a workspace at the boundary keeps the saved bytes within the limit. A search over the
limit, with quick solves, finds the best one, which is solved in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from remat.choice.trace_plan import TracePlan
from remat.documents.records import BaselineRecord
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import IN_FLIGHT_STAT
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate
from remat.solution import Solution
from remat.solve import solve
from remat.strategies.auto import Auto

_ESTIMATE = Auto(gap=0.1, peak_gap=0.1, time_limit=2.0)
"""The strategy of quick solves."""

_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits of the saved bytes that are tried, as shares of the largest one that may be useful."""

_ROUNDS = 2
"""How often the interval around the best limit is halved."""

_WORKSPACES = (0.25, 0.5, 0.75, 1.0)
"""Workspaces that are tried for the smallest peak, as shares of one call's smallest peak."""

Solve = Callable[[Trace, Budget], TracePlan]
"""Solves a step within a budget; raises `InfeasibleBudget`."""


def solve_in_flight(trace: Trace, budget: Budget, in_flight: int, solve: Solve) -> TracePlan:
    """Return the fastest plan of a step of which `in_flight` calls run before a backward.

    The memory of all calls together is within the budget; a percentage is of that memory without
    recomputation. The plan's graph counts what the other calls hold as constant memory. Raises
    `InfeasibleBudget` with the smallest budget that a plan was found for.
    """
    search = _Search(trace, in_flight, solve)
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
        f"with {in_flight} calls of the model before a backward, of which each holds what it "
        f"saves, no plan within {format_bytes(budget_bytes)} was found; the smallest peak "
        f"found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes). Pass a budget of "
        'at least that or "min", make the batch smaller, or call the model once with all '
        "inputs concatenated",
        min_feasible_bytes=smallest_bytes,
    )


class _Search:
    """The search over what each call may save. Sizes are in bytes."""

    def __init__(self, trace: Trace, in_flight: int, solve: Solve) -> None:
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
        self._largest_saved = _saved_bytes(
            graph.boundary, Schedule.keep_all(graph), timeline, self._constant
        )
        others_bytes = self._others * (self._largest_saved + self._inputs)
        self.baseline_bytes = timeline.peak_bytes + others_bytes
        self._baseline_s = timeline.time_s if graph.unsplit is None else graph.unsplit.time_s

    def fastest(self, budget: int) -> TracePlan | None:
        """Return the fastest plan within a budget; None if no plan was found.

        Quick solves rank the limits, and the best is solved in full.
        """
        is_enough = budget >= self.baseline_bytes
        ranked = [self._largest_saved] if is_enough else self._ranked_limits(self._trace, budget)
        plans = (self._plan(self._trace, budget, limit, self._solve) for limit in ranked)
        return next((plan for plan in plans if plan is not None), None)

    def smallest(self) -> TracePlan:
        """Return the plan of the smallest budget that a plan is found for: of the step, and of it
        with the operations split that the smallest peak of one call needs split."""
        split = self._solve(self._trace, Budget.parse("min")).trace
        traces = [self._trace] if split is self._trace else [self._trace, split]
        estimates = [self._smallest_estimate(trace) for trace in traces]
        place = min(range(len(traces)), key=lambda i: estimates[i].plan.peak_bytes)
        estimate, trace = estimates[place], traces[place]
        solved = self._plan(trace, estimate.plan.peak_bytes, self._saved(estimate), self._solve)
        return estimate if solved is None else solved

    def _smallest_estimate(self, trace: Trace) -> TracePlan:
        """Return the plan with the smallest peak of all calls that quick solves find.

        With a workspace at the boundary, the smallest peak of one call weighs the bytes that it
        saves: from the peak alone, with none, to the saved bytes alone, with a large one.
        """
        single = _estimate(trace, Budget.parse("min"))
        plans = [self._with_others(single, None)]
        for share in _WORKSPACES:
            workspace = int(share * (single.plan.peak_bytes - self._constant))
            limited = trace.replace(boundary_bytes=workspace)
            plans.append(self._with_others(_estimate(limited, Budget.parse("min")), None))
        return min(plans, key=lambda plan: plan.plan.peak_bytes)

    def _largest_limit(self, budget: int) -> int:
        """Return the limit beyond which saved bytes alone exceed what is left for a call."""
        available = budget - self._constant - self._tangents - self._others * self._inputs
        return available // self._in_flight

    def _ranked_limits(self, trace: Trace, budget: int) -> list[int]:
        """Return limits of the saved bytes, best first: by the time of quick solves, and then those
        for which none found a plan."""
        largest = self._largest_limit(budget)
        if largest <= 0:
            return []
        times: dict[int, float] = {}
        for share in _SHARES:
            self._estimate_times(trace, budget, int(share * largest), times)
        for _ in range(_ROUNDS):
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
        """Add the times of quick solves at a limit, and at the bytes that the plan for it saves: of
        less memory for the other calls, more is left to each."""
        while limit not in times:
            plan = self._plan(trace, budget, limit, _estimate)
            if plan is None:
                times[limit] = math.inf
                return
            times[limit] = plan.plan.time_s
            limit = min(limit, self._saved(plan))

    def _plan(self, trace: Trace, budget: int, limit: int, solve: Solve) -> TracePlan | None:
        """Return the plan of `solve` whose calls save at most `limit`; None if it finds none."""
        available = budget - self._others * (limit + self._inputs)
        workspace = available - self._constant - limit - self._tangents
        if workspace < 0:
            return None
        try:
            solved = solve(trace.replace(boundary_bytes=workspace), Budget.parse(available))
        except (InfeasibleBudget, SolverTimeout):
            return None
        return self._with_others(solved, budget)

    def _with_others(self, solved: TracePlan, budget: int | None) -> TracePlan:
        """Return a plan whose graph counts what the other calls hold. The budget is the peak if
        None is given."""
        schedule = solved.plan.schedule
        trace = solved.trace.replace(boundary_bytes=0)
        others_bytes = self._others * (self._saved(solved) + self._inputs)
        trace = trace.replace(
            external_bytes=trace.external_bytes + others_bytes,
            unsplit=BaselineRecord(peak_bytes=self.baseline_bytes, time_s=self._baseline_s),
        )
        graph = trace.graph()
        if budget is None:
            budget = simulate(graph, schedule).peak_bytes
        stats = {**solved.plan.stats, IN_FLIGHT_STAT: self._in_flight}
        return TracePlan(trace, Plan.of(graph, budget, Solution(schedule), stats))

    @staticmethod
    def _saved(solved: TracePlan) -> int:
        """Return what a call of a plan holds between its forward and its backward."""
        graph, schedule = solved.trace.replace(boundary_bytes=0).graph(), solved.plan.schedule
        return _saved_bytes(
            graph.boundary, schedule, simulate(graph, schedule), graph.constant_bytes
        )


def _estimate(trace: Trace, budget: Budget) -> TracePlan:
    return TracePlan(trace, solve(trace, budget, _ESTIMATE))


def _saved_bytes(
    boundary: int | None, schedule: Schedule, timeline: Timeline, constant_bytes: int
) -> int:
    """Return what a call holds between its forward and its backward, without constant memory."""
    assert boundary is not None
    return timeline.before_bytes[schedule.runs.index(boundary)] - constant_bytes
