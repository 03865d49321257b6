"""`solve`: one graph, one budget, one strategy, one plan. `sweep`: the frontier."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass, replace
from typing import Protocol

from remat.allocator.prediction import with_prediction
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverError, SolverWarning
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel, ProgressCallback, raise_progress_errors
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.solution import Solution, Stats, merge_stats
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, Task
from remat.strategies.search.step import warn_of_failure

_LEAST_S = 1.0
SWEEP = ("min", *(f"{percent}%" for percent in range(5, 101, 5)))


class HasGraph(Protocol):
    """Anything with a graph: a `Trace`."""

    def graph(self) -> Graph:
        """The graph to solve."""
        ...

    @property
    def cost_source(self) -> str:
        """Where its costs come from, in words."""
        ...


def solve(
    graph: Graph | HasGraph,
    budget: int | float | str | Budget,
    strategy: Strategy | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> Plan:
    """The cheapest schedule of `graph` whose peak is at most `budget`.

    `budget` is bytes (an int), a string ("8GiB", "60%" of the peak without recomputation), or
    "min": the smallest peak that the strategy finds, and then the cheapest schedule at that (or,
    where a smaller one is not excluded, within `peak_gap` of it), both within its time limit.
    `strategy` is `Auto()` by default. `progress` is called with a `Progress` now and then; `cancel`
    (an Event) ends the solve early with the best plan so far. What `progress` raises ends it, too,
    and is raised.

    A solver backend that fails on the way does not take the plan with it: the best schedule known
    is returned, with a `SolverWarning`, and the reason in `plan.stats["solver_error"]`.

    Raises `InfeasibleBudget` with the smallest peak found, `BudgetError`, `SolverTimeout` (no
    schedule within the time limit), `SolverError` (a backend that is missing, or fails before any
    schedule was known), and `RematError` if cancelled before any schedule was found.
    """
    stats: Stats = {} if isinstance(graph, Graph) else {"cost_source": graph.cost_source}
    traced, graph = graph, graph if isinstance(graph, Graph) else graph.graph()
    budget_bytes = Budget.parse(budget).in_bytes(_baseline_bytes(graph), graph.library_bytes)
    with raise_progress_errors(progress, cancel) as (progress, cancel):
        plan = _solve(graph, budget_bytes, strategy or Auto(), None, progress, cancel, stats)
    return _told(plan, traced)


def sweep(
    graph: Graph | HasGraph,
    budgets: Iterable[int | float | str | Budget] | None = None,
    strategy: Strategy | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    told: Callable[[Plan], None] | None = None,
) -> list[Plan]:
    """The plans for several budgets, smallest budget first: the time/memory frontier.

    Without `budgets`: 100%, 95%, ... of the peak without recomputation, down to the smallest
    feasible. Budgets that are infeasible are left out. Each solve begins from the plan for the
    next smaller budget, so cost never rises with the budget. `told` is called with each plan as
    soon as it is there. Once `cancel` is set, what is left is left out.
    """
    stats: Stats = {} if isinstance(graph, Graph) else {"cost_source": graph.cost_source}
    traced, graph = graph, graph if isinstance(graph, Graph) else graph.graph()
    strategy = strategy or Auto()
    baseline_bytes = _baseline_bytes(graph)
    wanted = map(Budget.parse, SWEEP if budgets is None else budgets)
    sizes = {budget.in_bytes(baseline_bytes, graph.library_bytes) for budget in wanted}
    plans: list[Plan] = []
    with raise_progress_errors(progress, cancel) as (progress, cancel):
        for size in sorted(sizes, key=lambda size: size or 0):  # "min" is None, and the smallest
            if plans and size is not None and size < plans[0].budget_bytes:
                continue
            if plans and cancel is not None and cancel.is_set():
                break
            start = plans[-1].schedule if plans else None
            try:
                plan = _solve(graph, size, strategy, start, progress, cancel, stats)
                plans.append(_told(plan, traced))
            except InfeasibleBudget:
                continue
            if told is not None:
                told(plans[-1])
    return plans


def _told(plan: Plan, graph: Graph | HasGraph) -> Plan:
    """The plan with what only a trace tells in `stats`: what torch's allocator makes of it on a
    CUDA device, and what the CPU takes to launch it, where that was measured."""
    if not isinstance(graph, Trace):
        return plan
    launch_s = graph.launch_s(plan.schedule.runs)
    if launch_s is not None:
        plan = replace(plan, stats={**plan.stats, "launch_s": launch_s})
    return with_prediction(plan, graph)


def warn_of_solver_failure(plan: Plan) -> None:
    """A `SolverWarning` where a solver failed on the way to this plan; for the functions that make
    plans, which were called by the user."""
    if "solver_error" in plan.stats:
        said = f"{plan.stats['solver_error']}. The plan is the best that is known without it"
        warnings.warn(said, SolverWarning, stacklevel=4)


def _baseline_bytes(graph: Graph) -> int:
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def _solve(
    graph: Graph,
    budget_bytes: int | None,
    strategy: Strategy,
    start: Schedule | None,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
    stats: Stats,
) -> Plan:
    began = time.monotonic()
    stats = {**stats, "strategy": strategy.name}
    if budget_bytes is None:
        smallest = strategy.run(Task(graph, None, start, progress, cancel))
        start = smallest.schedule
        budget_bytes = _near(simulate(graph, start).peak_bytes, smallest, strategy)
        stats["peak_search_s"] = time.monotonic() - began
        stats |= smallest.step_stats | smallest.failure_stats
        if smallest.bound is not None:
            stats["peak_bound_bytes"] = int(smallest.bound)
        strategy = _with_what_is_left(strategy, time.monotonic() - began)
    told = _for_budget(progress, budget_bytes)
    try:
        solution = strategy.run(Task(graph, budget_bytes, start, told, cancel))
    except Exception as error:
        is_in_hand = start is not None and peak_and_time(graph, start)[0] <= budget_bytes
        if start is None or not is_in_hand or isinstance(error, InfeasibleBudget):
            raise
        solution = Solution(start)
        if isinstance(error, SolverError):
            stats["solver_error"] = str(error)
        elif cancel is None or not cancel.is_set():
            warn_of_failure(stats, strategy.name, error)
    stats = merge_stats(stats, solution.stats)
    stats["total_s"] = time.monotonic() - began
    plan = Plan.of(graph, budget_bytes, solution, stats)
    warn_of_solver_failure(plan)
    return plan


def _for_budget(progress: ProgressCallback | None, budget_bytes: int) -> ProgressCallback | None:
    """Strategies do not say which budget they are asked for; a sweep has several."""
    if progress is None:
        return None
    return lambda now: progress(replace(now, budget_bytes=budget_bytes))


def _near(peak_bytes: int, smallest: Solution, strategy: Strategy) -> int:
    """The budget for "min": where it is not proved that no smaller peak is possible, up to the
    strategy's own tolerance above it. At the very smallest peak that happened to be found, a step
    costs far more than a per cent above, and little can be proved about it."""
    tolerance = getattr(strategy, "peak_gap", 0.0)
    if smallest.proved or not isinstance(tolerance, int | float):
        return peak_bytes
    return max(peak_bytes, int(peak_bytes * (1 + tolerance)))  # of sizes that no float has


def _with_what_is_left(strategy: Strategy, spent_s: float) -> Strategy:
    """The strategy with so much less of a time limit, if it has one."""
    limit = getattr(strategy, "time_limit", None)
    if not is_dataclass(strategy) or not isinstance(limit, int | float):
        return strategy
    return replace(strategy, time_limit=max(_LEAST_S, limit - spent_s))
