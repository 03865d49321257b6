"""`solve`: one graph, one budget, one strategy, one plan. `sweep`: plans for many budgets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from remat.allocator.budget_fitting import plan_within_allocator_budget
from remat.allocator.prediction import with_prediction
from remat.documents.trace import Trace
from remat.errors import GraphError, InfeasibleBudget, SolverError, SolverWarning, wrong_type
from remat.graph import Graph
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.limits.limits import INFEASIBLE_ERROR, plan_or_smallest
from remat.limits.units import format_bytes
from remat.passes.outputs import differentiated_bytes, unreturned_bytes
from remat.plan import Plan
from remat.plan_data import PlanTerms
from remat.progress import Cancel, ProgressCallback, is_cancelled, raise_progress_errors
from remat.schedule import Schedule
from remat.simulate import baseline_of, budget_in_bytes, peak_and_time, simulate
from remat.solution import Solution, Stats, merge_stats
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, Task, checked_strategy, clock_of, within_clock
from remat.strategies.search.step import warn_of_failure

_MIN_UNRETURNED_FRACTION = 0.01
"""The fraction of the peak from which outputs that need not be returned are worth a hint."""

SWEEP_BUDGETS = ("min", *(f"{percent}%" for percent in range(5, 101, 5)))


class HasGraph(Protocol):
    """Any object with a graph, such as a `Trace`."""

    def graph(self) -> Graph:
        """Return the graph to solve."""
        ...

    @property
    def cost_source(self) -> str:
        """Where the graph's costs come from, in words."""
        ...


def solve(
    graph: Graph | HasGraph,
    budget: int | float | str | Budget,
    strategy: Strategy | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    infeasible: str = INFEASIBLE_ERROR,
    reserved_bytes: int | None = None,
    start: Schedule | None = None,
) -> Plan:
    """Return the plan with the cheapest schedule of `graph` whose peak is at most `budget`.

    `budget` is bytes (an int), a string ("8GiB", "60%" of the peak without recomputation), or
    "min": the smallest peak that the strategy finds, and then the cheapest schedule at that (or, if
    a smaller one is not excluded, within `peak_gap` of it), both within its time limit. `strategy`
    is `Auto()` by default. `progress` is called with a `Progress` from time to time; `cancel` (an
    Event) ends the solve early with the best plan so far. An error of `progress` ends it, too, and
    is raised. With `infeasible="smallest"`, return the plan for "min" with a `BudgetWarning` if no
    plan fits the budget.

    For a trace of a CUDA device, torch's allocator also counts at most `budget` allocated bytes,
    and at most `reserved_bytes` reserved ones if that is passed (see
    `remat.allocator.budget_fitting`). `start` is a schedule of this graph from which `Auto` and
    `Exact` start, such as `plan.schedule` for another budget; it need not fit the budget. They
    ignore one in which operations first run in another order than the graph's, unless they search
    for an order; other strategies ignore any.

    If a solver backend fails, the best schedule so far is returned, with a `SolverWarning`, and the
    reason in `plan.stats["solver_error"]`.

    Raises `InfeasibleBudget` with the smallest peak found, `BudgetError`, `GraphError` if
    `start` is no valid schedule of the graph, `SolverTimeout` (no
    schedule within the time limit), `SolverError` (a backend that is missing, or fails before any
    schedule was found), and `RematError` if cancelled before any schedule was found.
    """
    strategy = checked_strategy(strategy or Auto())
    check_graph("solve", graph)
    if start is not None:
        if not isinstance(start, Schedule):
            raise wrong_type("solve", "a Schedule as `start`", start, "pass `plan.schedule`")
        try:
            start.check(graph if isinstance(graph, Graph) else graph.graph())
        except GraphError as error:
            reason = f"`start` is no schedule of this graph: {error}"
            raise GraphError(f"{reason}; pass the schedule of a plan of the same graph") from None
    try:
        with raise_progress_errors(progress, cancel) as (progress, cancel):
            search = _GraphPlanner(graph, strategy, progress, cancel, reserved_bytes)
            return plan_or_smallest(
                lambda budget: search.plan(budget, start),
                Budget.parse(budget),
                infeasible,
                peak_bytes=lambda p: p.peak_bytes,
            )
    except InfeasibleBudget as error:
        if hint := _hint_about_outputs(graph):
            raise error.with_hint(hint) from error
        raise


def _hint_about_outputs(graph: Graph | HasGraph) -> str:
    """Return a sentence about outputs that take memory and need not be returned, or ""."""
    if not isinstance(graph, Trace):
        return ""
    baseline_bytes = baseline_of(graph.graph()).peak_bytes
    size_bytes = unreturned_bytes(graph)
    if size_bytes >= _MIN_UNRETURNED_FRACTION * baseline_bytes:
        return (
            f"{format_bytes(size_bytes)} are outputs other than the loss; with "
            'outputs="loss" a training step does not return them'
        )
    size_bytes = differentiated_bytes(graph)
    if size_bytes >= _MIN_UNRETURNED_FRACTION * baseline_bytes:
        return (
            f"{format_bytes(size_bytes)} are outputs that gradients come from; pass the criterion "
            "of the training loop to remat.optimize as `loss`, and they need not exist as a whole"
        )
    return ""


def sweep(
    graph: Graph | HasGraph,
    budgets: Iterable[int | float | str | Budget] | None = None,
    strategy: Strategy | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> list[Plan]:
    """Return the plans for several budgets, smallest budget first: the frontier of time and memory.

    Without `budgets`: 100%, 95%, ... of the peak without recomputation, down to the smallest
    feasible. Infeasible budgets are omitted. Each solve starts from the plan for the next smaller
    budget, so cost never rises with the budget. `on_plan` is called with each plan as soon as it is
    solved, and with a second plan for a budget if a smaller one turns out to have a faster plan.
    Once `cancel` is set, the remaining budgets are omitted.
    """
    check_graph("sweep", graph)
    check_budgets("sweep", budgets)
    strategy = checked_strategy(strategy or Auto())
    traced, graph = graph, graph if isinstance(graph, Graph) else graph.graph()
    baseline_bytes = baseline_of(graph).peak_bytes
    parsed = map(Budget.parse, SWEEP_BUDGETS if budgets is None else budgets)
    by_size = {b.in_bytes(baseline_bytes, graph.library_bytes): b for b in parsed}
    smallest_bytes = peak_lower_bound_bytes(graph)
    plans: list[Plan] = []
    smallest: list[Schedule] = []  # the schedule with the smallest peak, once "min" is solved
    with raise_progress_errors(progress, cancel) as (progress, cancel):
        search = _GraphPlanner(traced, strategy, progress, cancel, on_smallest=smallest.append)
        for size in sorted(by_size, key=lambda size: size or 0):  # "min" is None, and comes first
            if size is not None and size < smallest_bytes:
                continue
            if plans and is_cancelled(cancel):
                break
            # The budget of "min" may be above the smallest peak, and other budgets in between.
            smaller = [p for p in plans if size is None or p.requested_budget_bytes <= size]
            starts = [plan.schedule for plan in smaller] or smallest
            try:
                plan = search.plan(by_size[size], starts[-1] if starts else None)
            except InfeasibleBudget:
                continue
            if size is None:
                smallest_bytes = peak_and_time(graph, smallest[-1])[0]
            solved = plans[len(smaller) :]
            larger = [p if p.time_s <= plan.time_s else _with_schedule_of(p, plan) for p in solved]
            plans = [*smaller, plan, *larger]
            if on_plan is not None:
                changed = (new for new, old in zip(larger, solved, strict=True) if new is not old)
                for report in (plan, *changed):
                    on_plan(report)
    return plans


def _with_schedule_of(plan: Plan, faster: Plan) -> Plan:
    """Return the plan with the schedule of a plan that is faster with a smaller budget."""
    bound = plan.lower_bound
    return replace(
        plan,
        schedule=faster.schedule,
        peak_bytes=faster.peak_bytes,
        time_s=faster.time_s,
        lower_bound=None if bound is None else min(bound, faster.overhead),
        terms=replace(plan.terms, launch_s=faster.terms.launch_s),
        allocator=faster.allocator,
    )


def check_graph(function: str, graph: object) -> None:
    """Raise TypeError if `function` cannot solve an object, such as a plan or a model."""
    if isinstance(graph, Graph) or callable(getattr(graph, "graph", None)):
        return
    remedy = "pass remat.measure(remat.trace(model, inputs))"
    if isinstance(getattr(graph, "graph", None), Graph):
        remedy = "pass its `graph`"
    raise wrong_type(function, "a Graph or a Trace", graph, remedy)


def check_budgets(function: str, budgets: object) -> None:
    """Raise TypeError for one budget in place of several; None is valid."""
    if isinstance(budgets, str | bytes) or not isinstance(budgets, Iterable | None):
        raise wrong_type(function, "several budgets", budgets, f"pass a list: [{budgets!r}]")


@dataclass(frozen=True)
class _GraphPlanner:
    """The solves of one graph by one strategy. `on_smallest` is called with the schedule that has
    the smallest peak, when that is found for "min"."""

    traced: Graph | HasGraph
    strategy: Strategy
    progress: ProgressCallback | None
    cancel: Cancel | None
    reserved_bytes: int | None = None
    on_smallest: Callable[[Schedule], None] | None = None

    def plan(self, budget: Budget, start: Schedule | None = None) -> Plan:
        """Return the plan within a budget, within the time limit of the strategy. For a trace on
        CUDA, torch's allocator stays within the budget, too. `start` is a schedule to start from,
        if there is one."""
        traced, strategy, clock = self.traced, self.strategy, clock_of(self.strategy)
        if not isinstance(traced, Trace):
            return self._plan_once(budget, start, strategy)

        def plan_once(budget: Budget) -> Plan:
            nonlocal strategy
            plan = self._plan_once(budget, start, strategy)
            strategy = within_clock(self.strategy, clock)
            launch_s = traced.launch_s(plan.schedule.runs)
            if launch_s is not None:
                plan = replace(plan, terms=replace(plan.terms, launch_s=launch_s))
            return with_prediction(plan, traced)

        return plan_within_allocator_budget(
            traced, budget, plan_once, reserved_bytes=self.reserved_bytes, cancel=self.cancel
        )

    def _plan_once(self, budget: Budget, start: Schedule | None, strategy: Strategy) -> Plan:
        traced = self.traced
        is_graph = isinstance(traced, Graph)
        graph = traced if is_graph else traced.graph()
        budget_bytes = budget_in_bytes(graph, budget)
        plan = _plan_within_bytes(
            graph, budget_bytes, strategy, start, self.progress, self.cancel, self.on_smallest
        )
        if is_graph:
            return plan
        return replace(plan, terms=replace(plan.terms, cost_source=traced.cost_source))


def warn_of_solver_failure(plan: Plan) -> None:
    """Issue a `SolverWarning` if a solver failed on the way to this plan. For functions that the
    user calls directly."""
    if "solver_error" in plan.solve:
        message = f"{plan.solve['solver_error']}. The plan is the best found without it"
        warnings.warn(message, SolverWarning, stacklevel=4)


def _plan_within_bytes(
    graph: Graph,
    budget_bytes: int | None,
    strategy: Strategy,
    start: Schedule | None,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
    on_smallest: Callable[[Schedule], None] | None = None,
) -> Plan:
    """Solve for a budget in bytes, or for the smallest peak and then at that, and simulate the
    result."""
    clock = clock_of(strategy)
    stats: Stats = {"strategy": strategy.name}
    gap = getattr(strategy, "gap", None)
    terms = PlanTerms(requested_gap=gap if isinstance(gap, int | float) else None)
    if budget_bytes is None:
        smallest = strategy.run(Task(graph, None, start, progress, cancel))
        start = smallest.schedule
        if on_smallest is not None:
            on_smallest(start)
        budget_bytes = _budget_for_min(simulate(graph, start).peak_bytes, smallest, strategy)
        stats["peak_search_s"] = clock.elapsed_s
        stats |= smallest.step_stats | smallest.failure_stats
        if smallest.bound is not None:
            stats["peak_bound_bytes"] = int(smallest.bound)
        strategy = within_clock(strategy, clock)
    progress_for_budget = _progress_with_budget(progress, budget_bytes)
    try:
        solution = strategy.run(Task(graph, budget_bytes, start, progress_for_budget, cancel))
    except Exception as error:
        start_fits = start is not None and peak_and_time(graph, start)[0] <= budget_bytes
        if start is None or not start_fits or isinstance(error, InfeasibleBudget):
            raise
        solution = Solution(start)
        if isinstance(error, SolverError):
            stats["solver_error"] = str(error)
        elif not is_cancelled(cancel):
            warn_of_failure(stats, strategy.name, error)
    stats = merge_stats(stats, solution.stats)
    stats["total_s"] = clock.elapsed_s
    plan = Plan.of(graph, budget_bytes, solution, stats, terms)
    warn_of_solver_failure(plan)
    return plan


def _progress_with_budget(
    progress: ProgressCallback | None, budget_bytes: int
) -> ProgressCallback | None:
    """Return the callback with the budget added to each report: strategies do not report it, and a
    sweep has several. None without a callback."""
    if progress is None:
        return None
    return lambda report: progress(replace(report, budget_bytes=budget_bytes))


def _budget_for_min(peak_bytes: int, smallest: Solution, strategy: Strategy) -> int:
    """Return the budget for "min": the smallest peak, or up to the strategy's own tolerance above
    it if a smaller peak is not proved impossible.

    At the very smallest peak that was found, a step costs far more than a percent above it, and
    little can be proved.
    """
    tolerance = getattr(strategy, "peak_gap", 0.0)
    if smallest.proved or not isinstance(tolerance, int | float):
        return peak_bytes
    return max(
        peak_bytes, int(peak_bytes * (1 + tolerance))
    )  # int() rounds sizes that no float represents
