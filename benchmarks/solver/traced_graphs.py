"""Section `traced`: graphs of real architectures, with budgets as shares of their peak."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.harness.report import Row
from benchmarks.models.traced import load_or_trace
from benchmarks.solver import jobs
from benchmarks.solver.record import (
    ResultRecord,
    all_met,
    format_decimal,
    format_mib,
    format_percent,
)

BUDGETS = ("70%", "50%", "35%", "20%", "min")
LARGEST = "gpt_10000"
_SMALL = 1_000
_SMALL_S = 20.0

_COLUMNS = (
    ("graph", -17), ("budget", 6), ("peak", 7), ("extra time", 10), ("gap", 7), ("bound", -6),
    ("status", -10), ("operations", 10), ("slots", 6), ("rows", 7), ("first s", 7), ("gap s", 6),
    ("total s", 7), ("RSS MiB", 7), ("met", -3), ("note", -60),
)  # fmt: skip


def requested_gap(name: str, budget: str) -> float:
    """Return the gap that a solve of a graph at a budget must prove."""
    return 0.01 if name == LARGEST or budget in ("20%", "min") else 0.005


def limit_s(name: str, options: Namespace) -> float:
    """Return the time limit of a solve of a graph in seconds."""
    return min(options.time_limit, 180.0 if name == LARGEST else 60.0)


def run_traced(record: ResultRecord, options: Namespace) -> None:
    """Solve each traced graph at each budget, each solve in a process of its own."""
    record.begin_section("traced", "traced training steps, roofline costs", _COLUMNS)
    for name in options.models:
        record.print_progress(f"traced {name}: trace")
        path, facts = load_or_trace(name, options.cache)
        record.add_summary("traced", name, facts)
        for budget in options.budgets:
            record.print_progress(f"traced {name} {budget}")
            row = jobs.solve(
                jobs.traced_graph_job(path),
                budget,
                gap=requested_gap(name, budget),
                time_limit=limit_s(name, options),
            )
            judge_and_add(record, row | {"graph": name, "trace_s": facts["trace_s"]})


def judge_and_add(record: ResultRecord, row: Row) -> None:
    """Set `met` of a row, store the row, and print it."""
    infeasible = row["status"] == "INFEASIBLE"
    if infeasible:
        row["met"] = None
    else:
        gap = row.get("gap")
        is_small = row.get("operations", 0) <= _SMALL
        row["met"] = all_met(
            gap is not None and gap <= row["options"]["gap"],
            row.get("gap_s", float("inf")) <= _SMALL_S if is_small else None,
        )
    record.add_row("traced", row, _cells(row))


def _cells(row: Row) -> tuple[object, ...]:
    """Return the table cells of a row."""
    note = row.get("failure", "")
    if row["status"] == "INFEASIBLE":
        proof = "proved" if row["proved"] else "not proved"
        smallest = row["smallest_peak_bytes"] / row["baseline_peak_bytes"]
        note = f"{proof}; smallest peak {format_percent(smallest, 1)}"
    elif row["budget"] == "min" and (bound := row["stats"].get("peak_bound_bytes")):
        note = f"peak at least {format_percent(bound / row['baseline_peak_bytes'], 1)}"
    share = row["peak_bytes"] / row["baseline_peak_bytes"] if "peak_bytes" in row else None
    return (
        row["graph"], row["budget"], format_percent(share, 1),
        format_percent(row.get("overhead")), format_percent(row.get("gap")), row.get("bound_scope"),
        row["status"], row.get("operations"), row.get("slots"), row.get("rows"),
        format_decimal(row.get("first_schedule_s")), format_decimal(row.get("gap_s")),
        format_decimal(row.get("seconds")), format_mib(row.get("peak_rss_bytes")), row["met"],
        note,
    )  # fmt: skip
