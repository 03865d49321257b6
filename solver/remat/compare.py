"""`compare`: the plans of all strategies for one graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, wrong_type
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.plan import Plan
from remat.progress import Cancel, Clock, ProgressCallback, is_cancelled
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.simulate import baseline_of
from remat.solve import HasGraph, check_budgets, check_graph, solve
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.registry import compared_by_default
from remat.view.html import comparison_fragment
from remat.view.pictures import comparison_svg

BUDGETS = ("90%", "70%", "50%", "30%", "min")
"""The budgets that `compare` solves for by default."""

SPLIT_ROWS = "auto+split"
"""The name of the rows of plans whose largest operations may be split."""


@dataclass(frozen=True)
class Comparison(ComparisonData[Plan]):
    """The rows, strategy by strategy, with the baseline that they are relative to."""

    def to_svg(self, *, device: str | None = None) -> str:
        """Return an SVG of extra time against peak memory. The plans of `Auto`, which have bounds,
        are the line; every other strategy's are points; `device` (a name) adds its memory."""
        return comparison_svg(self, device=device)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        return comparison_fragment(self)


def compare(
    graph: Graph | HasGraph,
    budgets: Iterable[int | float | str | Budget] | None = None,
    strategies: Iterable[Strategy] | None = None,
    *,
    measure_pieces: Callable[[Trace], Trace] | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    on_row: Callable[[ComparisonRow[Plan]], None] | None = None,
) -> Comparison:
    """Return the plans of several strategies for several budgets, as `solve` returns them.

    By default these are all registered strategies except for `exact`, at 90%, 70%, 50% and 30% of
    the peak without recomputation and at each strategy's own smallest peak ("min"). A budget that a
    strategy cannot meet, or a strategy that does not apply to this graph, gives a row with a
    reason. After any error that is not about a budget, a strategy is not run for further budgets.
    `on_row` is called with each row. Once `cancel` is set, the remaining rows are omitted.

    With `measure_pieces`, the last rows are by `Auto`, with the largest operations in pieces
    (`SPLIT_ROWS`), and `graph` must be a trace. The function adds costs to a trace in which
    operations were split, from the same source: `lambda t: remat.measure(t,
    remat.Roofline("h100"))`.

    Raises `BudgetError`.
    """
    check_graph("compare", graph)
    check_budgets("compare", budgets)
    traced = graph
    graph = graph if isinstance(graph, Graph) else graph.graph()
    baseline = baseline_of(graph)
    parsed = map(Budget.parse, BUDGETS if budgets is None else budgets)
    sized = [(b, b.in_bytes(baseline.peak_bytes, graph.library_bytes)) for b in parsed]
    rows: list[ComparisonRow[Plan]] = []
    if measure_pieces is not None and not isinstance(traced, Trace):
        raise wrong_type(
            "compare", "a Trace", traced, "leave `measure_pieces` out for another graph"
        )
    compared = [
        (strategy, None)
        for strategy in (compared_by_default() if strategies is None else strategies)
    ]
    compared += [] if measure_pieces is None else [(Auto(), measure_pieces)]
    for strategy, measure in compared:
        failed_row: ComparisonRow[Plan] | None = None
        for budget, size in sized:
            if is_cancelled(cancel):
                break
            if failed_row is None:
                row = _comparison_row(traced, budget, strategy, measure, progress, cancel)
                if row.plan is None and is_cancelled(cancel):
                    break
                failed_row = None if row.is_applicable else row
            else:
                row = replace(failed_row, budget=budget.requested, solve_s=0.0)
            if row.plan is None:
                row = replace(row, budget_bytes=size)
            rows.append(row)
            if on_row is not None:
                on_row(row)
    return Comparison(tuple(rows), baseline.peak_bytes, baseline.time_s)


def _comparison_row(
    graph: Graph | HasGraph,
    budget: Budget,
    strategy: Strategy,
    measure: Callable[[Trace], Trace] | None,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
) -> ComparisonRow[Plan]:
    """Return the row of a strategy at a budget, with its plan or the reason why there is none. With
    `measure`, operations may be split, and `graph` must be a trace."""
    started_at = time.monotonic()
    plan: Plan | None = None
    reason = ""
    is_applicable = True

    try:
        if measure is None:
            plan = solve(graph, budget, strategy, progress=progress, cancel=cancel)
        else:
            from remat.choice.plan_request import PlanRequest  # only this needs the passes
            from remat.choice.step import plan_step

            assert isinstance(graph, Trace)
            request = PlanRequest(Limits(budget), strategy, PIECES)
            plan = plan_step(
                graph,
                request,
                measure=measure,
                clock=Clock.of(math.inf, cancel),
                progress=progress,
                cancel=cancel,
            ).plan
    except InfeasibleBudget as error:
        reason = str(error)
    except RematError as error:
        reason = str(error)
        is_applicable = False
    seconds = time.monotonic() - started_at
    budget_bytes = None if plan is None else plan.requested_budget_bytes
    name = strategy.name if measure is None else SPLIT_ROWS
    return ComparisonRow(name, budget.requested, budget_bytes, plan, reason, seconds, is_applicable)
