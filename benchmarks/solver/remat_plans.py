"""remat's own plans of one graph, as far as they are known, to hold baselines against."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.harness.report import Row

EQUAL = 1e-9
"""Overheads that differ by less are equal."""


class RematPlans:
    """Plans by their peaks. `solve` gives a row for a budget; it is asked only where the plans
    known so far do not settle the question."""

    def __init__(self, solve: Callable[[str | int], Row], rows: Iterable[Row] = ()) -> None:
        self._solve = solve
        self._rows: dict[str | int, Row] = {row["budget"]: row for row in rows}

    def row_at(self, budget: str | int) -> Row:
        """remat's row for a budget."""
        if budget not in self._rows:
            self._rows[budget] = self._solve(budget)
        return self._rows[budget]

    def best_overhead_within(self, budget_bytes: int) -> float | None:
        """The least overhead of a known plan that fits."""
        fits = [
            row["overhead"]
            for row in self._rows.values()
            if "overhead" in row and row["peak_bytes"] <= budget_bytes
        ]
        return min(fits, default=None)

    def overhead_against(self, theirs: Row) -> float | None:
        """remat's overhead at a baseline's budget, or at its peak where that is its own minimum;
        None where remat has no plan there."""
        size = theirs["peak_bytes"] if theirs["budget"] == "min" else theirs["budget_bytes"]
        best = self.best_overhead_within(size)
        if best is None or best > theirs["overhead"] + EQUAL:
            self.row_at(size)
            best = self.best_overhead_within(size)
        return best
