"""Sections `published` and `random`: published graphs against published results."""

from __future__ import annotations

import math
from argparse import Namespace

from benchmarks.harness.report import Row
from benchmarks.solver import jobs
from benchmarks.solver.record import ResultRecord, all_met, format_decimal, format_percent

_CHECKMATE = {
    "CM1": {"90%": 0.029, "80%": 0.136, "70%": 0.892},
    "CM2": {"90%": 0.11, "80%": 0.30, "70%": 0.65, "50%": 1.73, "30%": 4.35},
}
"""Largest extra time in percent, to reach in `_CHECKMATE_S` and prove to `_CHECKMATE_GAP`."""

_CHECKMATE_S = 10.0
_CHECKMATE_GAP = 5e-4

_RANDOM_BUDGETS = ("90%", "80%", "70%")
_LOW_BUDGETS = ("60%", "50%", "40%")
"""Budgets without a published result."""

_REORDERED = {
    "RL1": {"90%": 0.0, "80%": 0.3},
    "RL2": {"90%": 0.0, "80%": 0.0, "70%": 2.6},
    "RL3": {"90%": 0.03, "80%": 2.3},
    "RL4": {"90%": 0.4, "80%": 2.5, "70%": 7.4},
}
"""Extra time in percent of FastSA (NeurIPS 2023), which changes the order."""

_GAP = {"on": 0.005, "off": 0.001}
"""Requested gap by `order`: results published for the fixed order are close to the optimum."""

_ANY = {("RL1", "70%"), ("RL3", "70%")}
"""Budgets at which FastSA has no schedule, so that any schedule is better."""

_FIXED = {
    "RL1": {"90%": 0.8, "80%": 2.3},
    "RL2": {"90%": 0.9, "80%": 4.9},
    "RL3": {"90%": 0.7, "80%": 3.4},
    "RL4": {"90%": 0.7, "80%": 3.4},
}
"""Extra time in percent of Moccasin (ICML 2023), in the order of the file."""

_COLUMNS = (
    ("graph", -5), ("order", -5), ("budget", 6), ("gap asked", 9), ("extra time", 10),
    ("gap", 8), ("bound", -6), ("status", -10), ("seconds", 8), ("target", 7), ("met", 4),
)  # fmt: skip


def run_published(record: ResultRecord, options: Namespace) -> None:
    """Solve CM1 and CM2 in their own order; judge extra time, gap and seconds."""
    record.begin_section("published", "Checkmate's graphs, in their order", _COLUMNS)
    for name, targets in _CHECKMATE.items():
        for gap in options.gaps:
            for budget, target in targets.items():
                record.print_progress(f"published {name} {budget} gap {gap:g}")
                row = jobs.solve(
                    jobs.published_graph_job(options.instances, name),
                    budget,
                    gap=gap,
                    time_limit=min(options.time_limit, 0.95 * _CHECKMATE_S),
                    order="off",
                )
                row["met"] = all_met(
                    _at_most(row, target, 3 if name == "CM1" else 2),
                    _proved(row, _CHECKMATE_GAP),
                    row.get("seconds", float("inf")) < _CHECKMATE_S,
                )
                _add(record, "published", row | {"graph": name, "target_percent": target})


def run_random(record: ResultRecord, options: Namespace) -> None:
    """Solve RL1 to RL4 with the order searched, and in the file's order if that is published."""
    record.begin_section("random", "random layered graphs", _COLUMNS)
    for name in _FIXED:
        if "off" in options.orders:
            _at_budgets(record, options, name, "off", tuple(_FIXED[name]))
        if "on" in options.orders:
            _at_budgets(record, options, name, "on", _RANDOM_BUDGETS)
    for name in _FIXED:
        if "on" in options.orders:
            _at_budgets(record, options, name, "on", _LOW_BUDGETS)


def _at_budgets(
    record: ResultRecord, options: Namespace, name: str, order: str, budgets: tuple[str, ...]
) -> None:
    """Solve one random graph at some budgets, and record the rows."""
    targets = (_REORDERED if order == "on" else _FIXED)[name]
    limit_s = min(options.time_limit, 180.0 if name == "RL4" else 60.0)
    for budget in budgets:
        record.print_progress(f"random {name} {budget} order {order}")
        row = jobs.solve(
            jobs.published_graph_job(options.instances, name),
            budget,
            gap=_GAP[order],
            time_limit=limit_s,
            order=order,
        )
        target = targets.get(budget)
        is_any = order == "on" and (name, budget) in _ANY
        row["met"] = all_met(
            None if target is None else _at_most(row, target, 2 if target < 0.1 else 1),
            "overhead" in row if is_any else None,
            row.get("seconds", math.inf) <= limit_s if budget in _RANDOM_BUDGETS else None,
        )
        cell_text = "any" if is_any else target
        _add(record, "random", row | {"graph": name, "target_percent": cell_text})


def _at_most(row: Row, target_percent: float, decimals: int) -> bool:
    """True if the extra time, rounded as the target, is not above it."""
    return "overhead" in row and round(100 * row["overhead"], decimals) <= target_percent


def _proved(row: Row, gap: float) -> bool:
    return row.get("gap") is not None and row["gap"] <= gap


def _add(record: ResultRecord, section: str, row: Row) -> None:
    """Store a row and print its cells."""
    options = row["options"] or {}
    cells = (
        row["graph"], options.get("order"), row["budget"], format_percent(options.get("gap"), 3),
        format_percent(row.get("overhead"), 3), format_percent(row.get("gap"), 3),
        row.get("bound_scope"),
        row["status"], format_decimal(row.get("seconds")), row["target_percent"], row["met"],
    )  # fmt: skip
    record.add_row(section, row, cells)
