"""Worker process that runs one baseline on one graph: a job on stdin, rows on stdout, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from benchmarks.solver.worker import job_graph, peak_rss_bytes
from remat.compare import Comparison, compare
from remat.report.comparison import ComparisonRow
from remat.strategies.base import Strategy
from remat.strategies.registry import compared_by_default

NAMES = tuple(strategy.name for strategy in compared_by_default() if strategy.name != "auto")
"""The names of the baselines."""


def main() -> int:
    """Read the job, run the baseline, and print a row for each budget."""
    job = json.load(sys.stdin)
    strategy = strategy_of(job["strategy"], job["time_limit"])
    compared = compare(job_graph(job), job["budgets"], [strategy])
    print(json.dumps({"rows": [_facts(row, compared) for row in compared.rows]}))
    return 0


def _facts(comparison_row: ComparisonRow, compared: Comparison) -> dict[str, Any]:
    """Return the JSON row of one budget."""
    row: dict[str, Any] = {
        "strategy": comparison_row.strategy,
        "budget": comparison_row.budget,
        "budget_bytes": comparison_row.budget_bytes,
        "baseline_peak_bytes": compared.baseline_peak_bytes,
        "seconds": comparison_row.solve_s,
        "applicable": comparison_row.is_applicable,
        "status": "NO PLAN" if comparison_row.plan is None else comparison_row.plan.status.name,
        "reason": comparison_row.reason,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if comparison_row.plan is not None:
        row |= {
            "peak_bytes": comparison_row.plan.peak_bytes,
            "overhead": comparison_row.plan.overhead,
            "gap": comparison_row.plan.gap,
        }
    return row


def strategy_of(name: str, time_limit_s: float) -> Strategy:
    """Return the baseline with a name, with the time limit if it has such a field."""
    strategy = next(s for s in compared_by_default() if s.name == name)
    assert dataclasses.is_dataclass(strategy)
    if any(field.name == "time_limit" for field in dataclasses.fields(strategy)):
        return dataclasses.replace(strategy, time_limit=time_limit_s)  # type: ignore[return-value]
    return strategy  # type: ignore[return-value]


if __name__ == "__main__":
    raise SystemExit(main())
