"""Sections `baselines` and `table2`: baseline strategies on the same graphs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from math import exp, fsum, log

from benchmarks.harness.report import Row
from benchmarks.models.traced import load_or_trace
from benchmarks.solver import jobs
from benchmarks.solver.record import ResultRecord, format_decimal, format_percent
from benchmarks.solver.remat_plans import EQUAL, RematPlans
from benchmarks.solver.traced_graphs import limit_s, requested_gap

BLOCK_RATIO = 0.85
"""The target for remat's extra time at the peak of per-block checkpointing, as a share of its."""

_TABLE2_BUDGETS = ("90%", "80%", "70%", "60%", "50%", "40%", "30%")
_SLACK_S = 20.0

_COLUMNS = (
    ("graph", -17), ("strategy", -13), ("budget", 6), ("peak", 7), ("extra time", 10),
    ("remat's", 9), ("ratio", 6), ("seconds", 8), ("met", 3), ("note", -60),
)  # fmt: skip


def run_baselines(record: ResultRecord, options: Namespace) -> None:
    """Run each baseline at each budget of the traced graphs. None may be better than remat."""
    record.begin_section("baselines", "baselines on the traced graphs", _COLUMNS)
    traced_rows = record.result["sections"].get("traced", [])
    for name in options.models:
        path, _ = load_or_trace(name, options.cache)
        source = jobs.traced_graph_job(path)
        solved_rows = [row for row in traced_rows if row["graph"] == name]

        def solve(budget: str | int, name: str = name, source: Row = source) -> Row:
            record.print_progress(f"baselines {name} {budget} remat")
            return jobs.solve(
                source,
                budget,
                gap=requested_gap(name, str(budget)),
                time_limit=limit_s(name, options),
            )

        remat_plans = RematPlans(solve, solved_rows)
        for strategy in options.strategies:
            for row in _rows(record, source, name, strategy, options.budgets, options):
                if "overhead" in row:
                    if _is_own_peak_of_blocks(row):
                        remat_plans.row_at(row["peak_bytes"])
                    row["remat_overhead"] = remat_plans.overhead_against(row)
                _judge(row)
                _add(record, "baselines", row)


def run_table2(record: ResultRecord, options: Namespace) -> None:
    """Run each baseline on Checkmate's graphs, and record its time over remat's optimum.

    The geometric mean is over the budgets for which the baseline has a plan.
    """
    record.begin_section(
        "table2", "Checkmate's Table 2 repeated: time as a ratio to the optimum", _COLUMNS
    )
    for name in ("CM1", "CM2"):
        source = jobs.published_graph_job(options.instances, name)
        remat_plans: dict[str, Row] = {}
        for budget in _TABLE2_BUDGETS:
            record.print_progress(f"table2 {name} {budget} remat")
            limit = min(options.time_limit, 60.0)
            remat_plans[budget] = jobs.solve(
                source, budget, gap=5e-4, time_limit=limit, order="off"
            )
            _add(record, "table2", remat_plans[budget] | {"graph": name, "strategy": "remat"})
        for strategy in options.strategies:
            ratios: list[float] = []
            for row in _rows(record, source, name, strategy, _TABLE2_BUDGETS, options):
                best = remat_plans.get(row["budget"], {}).get("overhead")
                if "overhead" in row and best is not None:
                    row["remat_overhead"] = best
                    row["ratio"] = (1 + row["overhead"]) / (1 + best)
                    row["met"] = row["ratio"] >= 1 - EQUAL
                    ratios.append(row["ratio"])
                _add(record, "table2", row)
            if ratios:
                mean = exp(fsum(map(log, ratios)) / len(ratios))
                facts = {"geometric_mean": mean, "budgets": len(ratios)}
                record.add_summary("table2", f"{name} {strategy}", facts)
                cell_text = f"geometric mean over {len(ratios)} budgets"
                record.print_row(
                    [
                        name,
                        strategy,
                        "all",
                        *[None] * 3,
                        format_decimal(mean, 3),
                        None,
                        None,
                        cell_text,
                    ]
                )


def _rows(
    record: ResultRecord,
    source: Row,
    name: str,
    strategy: str,
    budgets: Sequence[str],
    options: Namespace,
) -> list[Row]:
    """Return the rows of a baseline at each budget, run in one process.

    A baseline that does not apply to the graph has a single row.
    """
    record.print_progress(f"{name} {strategy}")
    limit = min(options.baseline_limit, options.time_limit)
    job = source | {"budgets": list(budgets), "strategy": strategy, "time_limit": limit}
    answer = jobs.run_worker("baseline_worker", job, len(budgets) * limit, slack_s=_SLACK_S)
    if answer.get("status") == "FAILED":
        return [{"graph": name, "strategy": strategy, **answer}]
    rows: list[Row] = []
    for row in answer["rows"]:
        rows.append({"graph": name, **row})
        if not row["applicable"]:
            break
    return rows


def _judge(row: Row) -> None:
    """Set `met` of a row: True if the baseline is not better than remat.

    At the own peak of per-block checkpointing, remat must be below `BLOCK_RATIO` of its extra time.
    """
    row["met"] = None
    if "overhead" not in row:
        return
    best = row["remat_overhead"]
    if best is None:
        row["met"] = False
    elif _is_own_peak_of_blocks(row):
        row["ratio"] = best / row["overhead"]
        row["met"] = row["ratio"] <= BLOCK_RATIO
    else:
        row["met"] = best <= row["overhead"] + EQUAL


def _is_own_peak_of_blocks(row: Row) -> bool:
    """True for the row of per-block checkpointing at its own peak, if that costs time."""
    return row["strategy"] == "per_block" and row["budget"] == "min" and row["overhead"] > 0


def _add(record: ResultRecord, section: str, row: Row) -> None:
    """Store a row and print its cells."""
    share = row["peak_bytes"] / row["baseline_peak_bytes"] if "peak_bytes" in row else None
    note = row.get("failure") or row.get("reason") or ""
    cells = (
        row["graph"], row["strategy"], row["budget"], format_percent(share, 1),
        format_percent(row.get("overhead"), 3), format_percent(row.get("remat_overhead"), 3),
        format_decimal(row.get("ratio"), 3), format_decimal(row.get("seconds")), row.get("met"),
        note[:60],
    )  # fmt: skip
    record.add_row(section, row, cells)
