"""remat's plans of one graph, solved on demand, to compare baselines with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.harness.report import Row

EQUAL = 1e-9
"""Overheads that differ by less are equal."""


class RematPlans:
    """Rows of remat's plans of one graph.

    `solve` returns the row of a budget. It is called only if the existing rows do not decide a
    comparison.
    """

    def __init__(self, solve: Callable[[str | int], Row], rows: Iterable[Row] = ()) -> None:
        self._solve = solve
        self._rows: dict[str | int, Row] = {row["budget"]: row for row in rows}

    def row_at(self, budget: str | int) -> Row:
        """Return remat's row at a budget, solving it if it is missing."""
        if budget not in self._rows:
            self._rows[budget] = self._solve(budget)
        return self._rows[budget]

    def best_overhead_within(self, budget_bytes: int) -> float | None:
        """Return the smallest overhead of the existing plans that fit into a budget, if any."""
        overheads = [
            row["overhead"]
            for row in self._rows.values()
            if "overhead" in row and row["peak_bytes"] <= budget_bytes
        ]
        return min(overheads, default=None)

    def overhead_against(self, baseline: Row) -> float | None:
        """Return remat's overhead at the budget of a baseline's row; None if it has no plan there.

        For the budget "min", remat gets the baseline's own smallest peak.
        """
        is_min = baseline["budget"] == "min"
        budget_bytes = baseline["peak_bytes"] if is_min else baseline["budget_bytes"]
        best = self.best_overhead_within(budget_bytes)
        if best is None or best > baseline["overhead"] + EQUAL:
            self.row_at(budget_bytes)
            best = self.best_overhead_within(budget_bytes)
        return best
