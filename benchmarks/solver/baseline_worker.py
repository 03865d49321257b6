"""One baseline on one graph: a job as JSON on stdin, its rows as JSON on stdout."""

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
"""The baselines, by name."""


def main() -> int:
    """Read the job, compare, print a row for each budget."""
    job = json.load(sys.stdin)
    strategy = strategy_of(job["strategy"], job["time_limit"])
    compared = compare(job_graph(job), job["budgets"], [strategy])
    print(json.dumps({"rows": [_facts(row, compared) for row in compared.rows]}))
    return 0


def _facts(found: ComparisonRow, compared: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": found.strategy,
        "budget": found.budget,
        "budget_bytes": found.budget_bytes,
        "baseline_peak_bytes": compared.baseline_peak_bytes,
        "seconds": found.seconds,
        "applicable": found.is_applicable,
        "status": "NO PLAN" if found.plan is None else found.plan.status.name,
        "reason": found.reason,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if found.plan is not None:
        row |= {
            "peak_bytes": found.plan.peak_bytes,
            "overhead": found.plan.overhead,
            "gap": found.plan.gap,
        }
    return row


def strategy_of(name: str, time_limit_s: float) -> Strategy:
    """A baseline by name, with the time limit where it has one."""
    strategy = next(s for s in compared_by_default() if s.name == name)
    assert dataclasses.is_dataclass(strategy)
    if any(field.name == "time_limit" for field in dataclasses.fields(strategy)):
        return dataclasses.replace(strategy, time_limit=time_limit_s)  # type: ignore[return-value]
    return strategy  # type: ignore[return-value]


if __name__ == "__main__":
    raise SystemExit(main())
