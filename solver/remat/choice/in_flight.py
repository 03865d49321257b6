"""Plans for steps that call a model several times before the backward.

A triplet loss, the discriminator of a GAN, a cell unrolled in time and pipeline parallelism run
`n` forwards before the first backward. While one call runs, each of the others holds what it saves,
so the memory of a step is (n - 1) saved + peak, with one schedule for all calls.

The two terms are divided by a limit of what a call may save: calls are solved with the rest of the
budget, and a workspace at the boundary keeps the saved bytes within the limit. A search over the
limit finds the fastest plan.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.choice.trace_plan import TracePlan
from remat.documents.records import BaselineRecord
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget
from remat.limits.budget import Budget
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import IN_FLIGHT_STAT
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate
from remat.solution import Solution

_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits of the saved bytes that are tried, as shares of the largest one that may be useful."""

_ROUNDS = 2
"""How often the interval around the best limit is halved."""

_MIN_STEP = 0.01
"""The smallest peak is searched to within this fraction."""

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
    if best is None:
        smallest_bytes = search.smallest().plan.peak_bytes
        raise InfeasibleBudget(
            f"with {in_flight} calls of the model before a backward, of which each holds what it "
            f"saves, no plan within {format_bytes(budget_bytes)} was found; the smallest peak "
            f"found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes). Pass a budget of "
            'at least that or "min", make the batch smaller, or call the model once with all '
            "inputs concatenated",
            min_feasible_bytes=smallest_bytes,
        )
    return best


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
        timeline = simulate(graph, Schedule.keep_all(graph))
        saved = _saved_bytes(graph.boundary, Schedule.keep_all(graph), timeline, self._constant)
        self.baseline_bytes = timeline.peak_bytes + self._others * (saved + self._inputs)
        self._baseline_s = timeline.time_s if graph.unsplit is None else graph.unsplit.time_s

    def fastest(self, budget: int) -> TracePlan | None:
        """Return the fastest plan within a budget; None if no plan was found."""
        # Beyond this limit, saved bytes alone exceed what is left for a call.
        largest = (budget - self._constant - self._others * self._inputs) / self._in_flight
        if largest <= 0:
            return None
        plans = {share: self._plan(budget, share * largest) for share in _SHARES}
        for _ in range(_ROUNDS):
            best_share = min(plans, key=lambda share: _time_s(plans[share]))
            if plans[best_share] is None:
                return None
            shares = sorted(plans)
            place = shares.index(best_share)
            for neighbour in (*shares[max(place - 1, 0) : place], *shares[place + 1 : place + 2]):
                middle = (best_share + neighbour) / 2
                plans[middle] = self._plan(budget, middle * largest)
        return min(plans.values(), key=_time_s)

    def smallest(self) -> TracePlan:
        """Return the plan of the smallest budget that a plan is found for, by bisection."""
        best, infeasible = self.fastest(self.baseline_bytes), self._constant
        assert best is not None  # what recomputes nothing
        while best.plan.peak_bytes - infeasible > _MIN_STEP * best.plan.peak_bytes:
            middle = (best.plan.peak_bytes + infeasible) // 2
            plan = self._first(middle)
            if plan is None:
                infeasible = middle
            else:
                best = plan
        return best

    def _first(self, budget: int) -> TracePlan | None:
        """Return any plan within a budget."""
        largest = (budget - self._constant - self._others * self._inputs) / self._in_flight
        plans = (self._plan(budget, share * largest) for share in _SHARES if largest > 0)
        return next((plan for plan in plans if plan is not None), None)

    def _plan(self, budget: int, saved_limit: float) -> TracePlan | None:
        """Return the fastest plan whose calls save at most `saved_limit`."""
        limit = int(saved_limit)
        available = budget - self._others * (limit + self._inputs)
        workspace = available - self._constant - limit
        if workspace < 0:
            return None
        limited = self._trace.replace(boundary_bytes=workspace)
        try:
            solved = self._solve(limited, Budget.parse(available))
        except InfeasibleBudget:
            return None
        return self._with_others(solved, budget)

    def _with_others(self, solved: TracePlan, budget: int) -> TracePlan:
        """Return a plan whose graph counts what the other calls hold."""
        schedule = solved.plan.schedule
        trace = solved.trace.replace(boundary_bytes=0)
        graph = trace.graph()
        timeline = simulate(graph, schedule)
        saved = _saved_bytes(graph.boundary, schedule, timeline, graph.constant_bytes)
        trace = trace.replace(
            external_bytes=trace.external_bytes + self._others * (saved + self._inputs),
            unsplit=BaselineRecord(peak_bytes=self.baseline_bytes, time_s=self._baseline_s),
        )
        stats = {**solved.plan.stats, IN_FLIGHT_STAT: self._in_flight}
        return TracePlan(trace, Plan.of(trace.graph(), budget, Solution(schedule), stats))


def _saved_bytes(
    boundary: int | None, schedule: Schedule, timeline: Timeline, constant_bytes: int
) -> int:
    """Return what a call holds between its forward and its backward, without constant memory."""
    assert boundary is not None
    return timeline.before_bytes[schedule.runs.index(boundary)] - constant_bytes


def _time_s(plan: TracePlan | None) -> float:
    return float("inf") if plan is None else plan.plan.time_s
