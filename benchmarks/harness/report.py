"""Output of benchmark results: a printed table, and a dated JSON file."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from remat.limits.units import format_bytes

RESULTS = Path(__file__).parents[1] / "results"
"""The folder of result files that the documentation reads."""

Row = dict[str, Any]

COLUMNS = (
    "method", "budget", "peak", "peak / eager", "step median (min)", "time / eager",
    "FLOPs / eager", "set-up",
)  # fmt: skip


def table_cells(row: Row, eager_method: Row) -> tuple[str, ...]:
    """Return the table cells of one method's row."""
    if row["failure"]:
        return (row["method"], *[""] * 6, row["failure"][:60])
    setup = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row["setup_s"].items())
    if "step_s" not in row:
        return (row["method"], *[""] * 6, setup)
    budget = row["budget_bytes"]
    return (
        row["method"],
        format_bytes(budget) if budget else "",
        format_bytes(row["peak_bytes"]),
        f"{row['peak_bytes'] / eager_method['peak_bytes']:.3f}",
        f"{row['step_s_median']:.3f} s ({row['step_s_min']:.3f} s)",
        f"{row['time_ratio_median']:.3f}",
        f"{row['flops_ratio']:.3f}" if row["flops_ratio"] else "",
        setup,
    )


def print_table(title: str, rows: list[Row]) -> None:
    """Print a table of methods, with rich if it is installed."""
    lines = [table_cells(row, rows[0]) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n" + " | ".join(COLUMNS))
        for line in lines:
            print(" | ".join(line))
        return
    table = Table(*COLUMNS, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def write_result(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write a result to `YYYY-MM-DD-name.json` in `folder`, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
