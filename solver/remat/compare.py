"""`compare`: what every known way to trade time for memory does with one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from remat.budget import format_bytes, format_seconds, parse_budget
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.graph import Graph
from remat.plan import Plan
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import HasGraph, solve
from remat.strategies.articulation import ArticulationPoints
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.checkmate import CheckmateMilp
from remat.strategies.chen_greedy import ChenGreedy
from remat.strategies.chen_sqrt import ChenSqrt
from remat.strategies.every_k import EveryK
from remat.strategies.keep_all import KeepAll
from remat.strategies.knapsack import Knapsack
from remat.strategies.lp_rounding import LpRounding
from remat.strategies.per_block import PerBlock
from remat.strategies.recompute_all import RecomputeAll
from remat.strategies.revolve import Revolve
from remat.strategies.rotor import Rotor

BUDGETS = ("90%", "70%", "50%", "30%", "min")

STRATEGIES: tuple[Strategy, ...] = (
    Auto(),
    KeepAll(),
    PerBlock(),
    EveryK(),
    ChenSqrt(),
    ChenGreedy(),
    ArticulationPoints("sqrt"),
    ArticulationPoints("greedy"),
    Knapsack(),
    Revolve(),
    Rotor(),
    RecomputeAll(),
    LpRounding(time_limit=60.0),
    CheckmateMilp(time_limit=60.0),
)


@dataclass(frozen=True)
class Row:
    """One strategy at one budget: its plan, or the reason why there is none.

    `budget_bytes` is None where the budget "min" found nothing; `is_applicable` is False where the
    strategy does not work on this graph at all.
    """

    strategy: str
    budget: int | float | str
    budget_bytes: int | None
    plan: Plan | None
    reason: str
    seconds: float
    is_applicable: bool = True


@dataclass(frozen=True)
class Comparison:
    """The rows, strategy by strategy, with what they are relative to."""

    rows: tuple[Row, ...]
    baseline_peak_bytes: int
    baseline_time_s: float

    def frontier(self) -> dict[str, list[tuple[int, float]]]:
        """For each strategy with a plan, (peak in bytes, time in seconds) of the plans that no
        other of its own beats in both, smallest peak first."""
        found: dict[str, list[tuple[int, float]]] = {}
        for name in dict.fromkeys(row.strategy for row in self.rows):
            plans = [row.plan for row in self.rows if row.strategy == name and row.plan]
            points: list[tuple[int, float]] = []
            for point in sorted((plan.peak_bytes, plan.time_s) for plan in plans):
                if not points or point[1] < points[-1][1]:
                    points.append(point)
            if points:
                found[name] = points
        return found

    def describe(self) -> str:
        """A table, one line a strategy and one column a budget."""
        names = list(dict.fromkeys(row.strategy for row in self.rows))
        budgets = list(dict.fromkeys(row.budget for row in self.rows))
        cells = {(row.strategy, row.budget): row for row in self.rows}
        table = [["strategy", *map(self._heading, budgets), "gap", "solved in"]]
        for name in names:
            rows = [cells[name, budget] for budget in budgets if (name, budget) in cells]
            if any(row.is_applicable for row in rows):
                spent = format_seconds(sum(row.seconds for row in rows))
                line = [self._cell(cells.get((name, budget))) for budget in budgets]
                table.append([name, *line, _gap(rows), spent])
        lines = [
            f"without recomputation: peak {format_bytes(self.baseline_peak_bytes)}, "
            f"time {format_seconds(self.baseline_time_s)}",
            "extra time (peak reached, in % of that without recomputation); - does not fit; "
            "gap: the largest that is proved",
            "",
            *aligned(table),
        ]
        reasons = {row.strategy: row.reason for row in self.rows if not row.is_applicable}
        if reasons:
            lines += ["", *(f"{name}: {reason}" for name, reason in reasons.items())]
        return "\n".join(lines)

    def to_svg(self, *, device: str | None = None) -> str:
        """A picture: extra time against peak memory. The plans of `Auto`, which come with bounds,
        are the line, every other strategy's are points; `device` (a name) adds its memory."""
        from remat.view.frontier import frontier_svg

        own = Auto().name
        line = [row.plan for row in self.rows if row.plan is not None and row.strategy == own]
        others = [row for row in self.rows if row.strategy != own]
        return frontier_svg(line, others, device=device)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from remat.view.html import comparison_fragment

        return comparison_fragment(self)

    def __str__(self) -> str:
        return self.describe()

    def _heading(self, budget: int | float | str) -> str:
        row = next((r for r in self.rows if r.budget == budget and r.budget_bytes), None)
        if budget == "min" or row is None or row.budget_bytes is None:
            return "own minimum" if budget == "min" else str(budget)
        named = f"{budget} " if isinstance(budget, str) and budget.endswith("%") else ""
        return f"{named}{format_bytes(row.budget_bytes)}"

    def _cell(self, row: Row | None) -> str:
        if row is None or row.plan is None:
            return "-" if row is None or row.is_applicable else "n/a"
        return f"{row.plan.overhead:+.2%} ({row.plan.share:.0%})"


def compare(
    graph: Graph | HasGraph,
    budgets: Iterable[int | float | str] | None = None,
    strategies: Iterable[Strategy] | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
    told: Callable[[Row], None] | None = None,
) -> Comparison:
    """The plans of several strategies for several budgets, as `solve` gives them.

    By default every strategy there is, at 90%, 70%, 50% and 30% of the peak without recomputation
    and at each one's own smallest peak ("min"). A budget that a strategy cannot meet, and a
    strategy that does not work on this graph, are rows with a reason. After a failure other than
    that of a budget, a strategy is not asked again. Once `cancel` is set, what is left is left out.

    Raises `BudgetError`.
    """
    traced = graph
    graph = graph if isinstance(graph, Graph) else graph.graph()
    baseline = simulate(graph, Schedule.keep_all(graph))
    wanted = tuple(BUDGETS if budgets is None else budgets)
    rows: list[Row] = []
    for strategy in STRATEGIES if strategies is None else strategies:
        failed: Row | None = None
        for budget in wanted:
            if cancel is not None and cancel.is_set():
                break
            if failed is None:
                row = _row(traced, budget, strategy, progress, cancel)
                if row.plan is None and cancel is not None and cancel.is_set():
                    break
                failed = None if row.is_applicable else row
            else:
                row = replace(failed, budget=budget, seconds=0.0)
            if row.plan is None:
                size = parse_budget(
                    budget, baseline_bytes=baseline.peak_bytes, library_bytes=graph.library_bytes
                )
                row = replace(row, budget_bytes=size if isinstance(size, int) else None)
            rows.append(row)
            if told is not None:
                told(row)
    return Comparison(tuple(rows), baseline.peak_bytes, baseline.time_s)


def _row(
    graph: Graph | HasGraph,
    budget: int | float | str,
    strategy: Strategy,
    progress: ProgressCallback | None,
    cancel: Cancel | None,
) -> Row:
    began = time.monotonic()
    plan: Plan | None = None
    reason = ""
    is_applicable = True
    try:
        plan = solve(graph, budget, strategy, progress=progress, cancel=cancel)
    except BudgetError:
        raise
    except InfeasibleBudget as error:
        reason = str(error)
    except RematError as error:
        reason = str(error)
        is_applicable = False
    spent_s = time.monotonic() - began
    budget_bytes = None if plan is None else plan.budget_bytes
    return Row(strategy.name, budget, budget_bytes, plan, reason, spent_s, is_applicable)


def _gap(rows: Sequence[Row]) -> str:
    gaps = [row.plan.gap for row in rows if row.plan and row.plan.gap is not None]
    return f"{max(gaps):.2%}" if gaps else ""


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for line in table:
        first, *others = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return lines
