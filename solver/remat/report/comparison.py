"""A comparison of strategies, as data and as a table. `remat.compare` returns its subclass
`Comparison`, which also has pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import P
from remat.report.report import Described, Report, Table


@dataclass(frozen=True)
class ComparisonRow(Generic[P]):
    """A strategy at one budget: its plan, or the reason why there is none.

    `budget_bytes` is None if the budget is "min" and the strategy has no plan. `is_applicable` is
    False if the strategy does not support this graph. `solve_s` is the time that it took.
    """

    strategy: str
    budget: int | float | str
    budget_bytes: int | None
    plan: P | None
    reason: str
    solve_s: float
    is_applicable: bool = True


@dataclass(frozen=True)
class ComparisonData(Described, Generic[P]):
    """The rows of a comparison, one strategy after the other, and the peak and time without
    recomputation."""

    rows: tuple[ComparisonRow[P], ...]
    baseline_peak_bytes: int
    baseline_time_s: float

    def frontier(self) -> dict[str, list[tuple[int, float]]]:
        """Return the Pareto frontier of each strategy that has a plan: (peak in bytes, time in
        seconds), smallest peak first."""
        frontiers: dict[str, list[tuple[int, float]]] = {}
        for name in dict.fromkeys(row.strategy for row in self.rows):
            plans = [row.plan for row in self.rows if row.strategy == name and row.plan]
            points: list[tuple[int, float]] = []
            for point in sorted((plan.peak_bytes, plan.time_s) for plan in plans):
                if not points or point[1] < points[-1][1]:
                    points.append(point)
            if points:
                frontiers[name] = points
        return frontiers

    def report(self) -> Report:
        """Return a table with a line per strategy and a column per budget. Strategies that do not
        support the graph are in notes, with the reason."""
        names = list(dict.fromkeys(row.strategy for row in self.rows))
        budgets = list(dict.fromkeys(row.budget for row in self.rows))
        cells = {(row.strategy, row.budget): row for row in self.rows}
        table = [["strategy", *map(self._heading, budgets), "gap", "solved in"]]
        for name in names:
            rows = [cells[name, budget] for budget in budgets if (name, budget) in cells]
            if any(row.is_applicable for row in rows):
                solve_time = format_seconds(sum(row.solve_s for row in rows))
                line = [self._cell(cells.get((name, budget))) for budget in budgets]
                table.append([name, *line, _largest_gap_text(rows), solve_time])
        head = (
            f"without recomputation: peak {format_bytes(self.baseline_peak_bytes)}, "
            f"time {format_seconds(self.baseline_time_s)}\n"
            "cells: extra time (peak, in % of that without recomputation); - does not fit; "
            "gap: the largest proved gap"
        )
        reasons = {row.strategy: row.reason for row in self.rows if not row.is_applicable}
        notes = (f"{name}: {reason}" for name, reason in reasons.items())
        return Report(head, Table(table), "\n".join(notes))

    def _heading(self, budget: int | float | str) -> str:
        """Return the heading of a budget's column, with its bytes."""
        row = next((r for r in self.rows if r.budget == budget and r.budget_bytes), None)
        if budget == "min" or row is None or row.budget_bytes is None:
            return "own minimum" if budget == "min" else str(budget)
        share = f"{budget} " if isinstance(budget, str) and budget.endswith("%") else ""
        return f"{share}{format_bytes(row.budget_bytes)}"

    def _cell(self, row: ComparisonRow[P] | None) -> str:
        """Return the extra time and peak of a row as text; "-" or "n/a" without a plan."""
        if row is None or row.plan is None:
            return "-" if row is None or row.is_applicable else "n/a"
        return f"{row.plan.overhead:+.2%} ({row.plan.share:.0%})"


def _largest_gap_text(rows: Sequence[ComparisonRow[P]]) -> str:
    """Return the largest proved gap of some rows as text; "" if nothing is proved."""
    gaps = [row.plan.gap for row in rows if row.plan and row.plan.gap is not None]
    return f"{max(gaps):.2%}" if gaps else ""
