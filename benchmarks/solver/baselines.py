"""Sections `baselines` and `table2`: what others do with the same graphs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from math import exp, fsum, log

from benchmarks.report import Row
from benchmarks.solver import jobs
from benchmarks.solver.graphs import asked_gap, limit_s
from benchmarks.solver.ours import EQUAL, Ours
from benchmarks.solver.record import Record, decimal, percent
from benchmarks.traced import cached

BLOCK_RATIO = 0.85
"""Of per-block checkpointing's extra time, remat takes at most this at its peak."""

_TABLE2_BUDGETS = ("90%", "80%", "70%", "60%", "50%", "40%", "30%")
_SLACK_S = 20.0

_COLUMNS = (
    ("graph", -17), ("strategy", -13), ("budget", 6), ("peak", 7), ("extra time", 10),
    ("remat's", 9), ("ratio", 6), ("seconds", 8), ("met", 3), ("note", -60),
)  # fmt: skip


def baselines(record: Record, options: Namespace) -> None:
    """Each baseline at each budget of the traced graphs; none may be better than remat."""
    record.begin("baselines", "baselines on the traced graphs", _COLUMNS)
    solved = record.result["sections"].get("traced", [])
    for name in options.models:
        path, _ = cached(name, options.cache)
        source = jobs.traced(path)
        known = [row for row in solved if row["graph"] == name]

        def solve(budget: str | int, name: str = name, source: Row = source) -> Row:
            record.progress(f"baselines {name} {budget} remat")
            return jobs.solve(
                source,
                budget,
                gap=asked_gap(name, str(budget)),
                time_limit=limit_s(name, options),
            )

        ours = Ours(solve, known)
        for strategy in options.strategies:
            for row in _rows(record, source, name, strategy, options.budgets, options):
                if "overhead" in row:
                    if _is_own_peak_of_blocks(row):
                        ours.at(row["peak_bytes"])
                    row["remat_overhead"] = ours.beside(row)
                _judge(row)
                _add(record, "baselines", row)


def table2(record: Record, options: Namespace) -> None:
    """Time of each baseline over remat's optimum, over the budgets where it has a plan."""
    record.begin("table2", "Checkmate's Table 2 anew: time as a ratio to the optimum", _COLUMNS)
    for name in ("CM1", "CM2"):
        source = jobs.published(options.instances, name)
        ours: dict[str, Row] = {}
        for budget in _TABLE2_BUDGETS:
            record.progress(f"table2 {name} {budget} remat")
            limit = min(options.time_limit, 60.0)
            ours[budget] = jobs.solve(source, budget, gap=5e-4, time_limit=limit, order="off")
            _add(record, "table2", ours[budget] | {"graph": name, "strategy": "remat"})
        for strategy in options.strategies:
            ratios: list[float] = []
            for row in _rows(record, source, name, strategy, _TABLE2_BUDGETS, options):
                best = ours.get(row["budget"], {}).get("overhead")
                if "overhead" in row and best is not None:
                    row["remat_overhead"] = best
                    row["ratio"] = (1 + row["overhead"]) / (1 + best)
                    row["met"] = row["ratio"] >= 1 - EQUAL
                    ratios.append(row["ratio"])
                _add(record, "table2", row)
            if ratios:
                mean = exp(fsum(map(log, ratios)) / len(ratios))
                facts = {"geometric_mean": mean, "budgets": len(ratios)}
                record.note("table2", f"{name} {strategy}", facts)
                shown = f"geometric mean over {len(ratios)} budgets"
                record.line(
                    [name, strategy, "all", *[None] * 3, decimal(mean, 3), None, None, shown]
                )


def _rows(
    record: Record,
    source: Row,
    name: str,
    strategy: str,
    budgets: Sequence[str],
    options: Namespace,
) -> list[Row]:
    """A baseline at each budget, in one process; once where it does not apply."""
    record.progress(f"{name} {strategy}")
    limit = min(options.baseline_limit, options.time_limit)
    job = source | {"budgets": list(budgets), "strategy": strategy, "time_limit": limit}
    found = jobs.run("baseline_worker", job, len(budgets) * limit, slack_s=_SLACK_S)
    if found.get("status") == "FAILED":
        return [{"graph": name, "strategy": strategy, **found}]
    rows: list[Row] = []
    for row in found["rows"]:
        rows.append({"graph": name, **row})
        if not row["applicable"]:
            break
    return rows


def _judge(row: Row) -> None:
    """Whether the baseline is no better; for per-block's own peak, whether remat is well below."""
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
    return row["strategy"] == "per_block" and row["budget"] == "min" and row["overhead"] > 0


def _add(record: Record, section: str, row: Row) -> None:
    share = row["peak_bytes"] / row["baseline_peak_bytes"] if "peak_bytes" in row else None
    note = row.get("failure") or row.get("reason") or ""
    cells = (
        row["graph"], row["strategy"], row["budget"], percent(share, 1),
        percent(row.get("overhead"), 3), percent(row.get("remat_overhead"), 3),
        decimal(row.get("ratio"), 3), decimal(row.get("seconds")), row.get("met"), note[:60],
    )  # fmt: skip
    record.add(section, row, cells)
