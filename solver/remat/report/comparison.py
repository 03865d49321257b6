"""Strategies side by side, as data and as a table. What users hold is a `Comparison`
(`remat.compare`), which has pictures too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import P
from remat.report.tables import align_columns


@dataclass(frozen=True)
class ComparisonRow(Generic[P]):
    """One strategy at one budget: its plan, or the reason why there is none.

    `budget_bytes` is None where the budget "min" found nothing; `is_applicable` is False where the
    strategy does not work on this graph at all.
    """

    strategy: str
    budget: int | float | str
    budget_bytes: int | None
    plan: P | None
    reason: str
    seconds: float
    is_applicable: bool = True


@dataclass(frozen=True)
class ComparisonData(Generic[P]):
    """The rows, strategy by strategy, with what they are relative to."""

    rows: tuple[ComparisonRow[P], ...]
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
            *align_columns(table),
        ]
        reasons = {row.strategy: row.reason for row in self.rows if not row.is_applicable}
        if reasons:
            lines += ["", *(f"{name}: {reason}" for name, reason in reasons.items())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def _heading(self, budget: int | float | str) -> str:
        row = next((r for r in self.rows if r.budget == budget and r.budget_bytes), None)
        if budget == "min" or row is None or row.budget_bytes is None:
            return "own minimum" if budget == "min" else str(budget)
        named = f"{budget} " if isinstance(budget, str) and budget.endswith("%") else ""
        return f"{named}{format_bytes(row.budget_bytes)}"

    def _cell(self, row: ComparisonRow[P] | None) -> str:
        if row is None or row.plan is None:
            return "-" if row is None or row.is_applicable else "n/a"
        return f"{row.plan.overhead:+.2%} ({row.plan.share:.0%})"


def _gap(rows: Sequence[ComparisonRow[P]]) -> str:
    gaps = [row.plan.gap for row in rows if row.plan and row.plan.gap is not None]
    return f"{max(gaps):.2%}" if gaps else ""
