"""`compare`: what every known way to trade time for memory does with one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from remat.errors import InfeasibleBudget, RematError
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel, ProgressCallback
from remat.report.comparison import Compared, Row
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import HasGraph, solve
from remat.strategies.base import Strategy
from remat.strategies.registry import compared_by_default
from remat.view.frontier import comparison_svg
from remat.view.html import comparison_fragment

BUDGETS = ("90%", "70%", "50%", "30%", "min")


@dataclass(frozen=True)
class Comparison(Compared[Plan]):
    """The rows, strategy by strategy, with what they are relative to."""

    def to_svg(self, *, device: str | None = None) -> str:
        """A picture: extra time against peak memory. The plans of `Auto`, which come with bounds,
        are the line, every other strategy's are points; `device` (a name) adds its memory."""
        return comparison_svg(self, device=device)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return comparison_fragment(self)


def compare(
    graph: Graph | HasGraph,
    budgets: Iterable[int | float | str | Budget] | None = None,
    strategies: Iterable[Strategy] | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    told: Callable[[Row[Plan]], None] | None = None,
) -> Comparison:
    """The plans of several strategies for several budgets, as `solve` gives them.

    By default every strategy that is registered, but for `exact`, at 90%, 70%, 50% and 30% of the
    peak without recomputation and at each one's own smallest peak ("min"). A budget that a strategy
    cannot meet, and a strategy that does not work on this graph, are rows with a reason. After a
    failure other than that of a budget, a strategy is not asked again. Once `cancel` is set, what
    is left is left out.

    Raises `BudgetError`.
    """
    traced = graph
    graph = graph if isinstance(graph, Graph) else graph.graph()
    baseline = simulate(graph, Schedule.keep_all(graph))
    asked = map(Budget.parse, BUDGETS if budgets is None else budgets)
    sized = [(b, b.in_bytes(baseline.peak_bytes, graph.library_bytes)) for b in asked]
    rows: list[Row[Plan]] = []
    for strategy in compared_by_default() if strategies is None else strategies:
        failed: Row[Plan] | None = None
        for budget, size in sized:
            if cancel is not None and cancel.is_set():
                break
            if failed is None:
                row = _row(traced, budget, strategy, progress, cancel)
                if row.plan is None and cancel is not None and cancel.is_set():
                    break
                failed = None if row.is_applicable else row
            else:
                row = replace(failed, budget=budget.requested, seconds=0.0)
            if row.plan is None:
                row = replace(row, budget_bytes=size)
            rows.append(row)
            if told is not None:
                told(row)
    return Comparison(tuple(rows), baseline.peak_bytes, baseline.time_s)


def _row(
    graph: Graph | HasGraph,
    budget: Budget,
    strategy: Strategy,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
) -> Row[Plan]:
    began = time.monotonic()
    plan: Plan | None = None
    reason = ""
    is_applicable = True
    try:
        plan = solve(graph, budget, strategy, progress=progress, cancel=cancel)
    except InfeasibleBudget as error:
        reason = str(error)
    except RematError as error:
        reason = str(error)
        is_applicable = False
    spent_s = time.monotonic() - began
    budget_bytes = None if plan is None else plan.budget_bytes
    return Row(strategy.name, budget.requested, budget_bytes, plan, reason, spent_s, is_applicable)
