"""Table of training on batches of many lengths."""

from __future__ import annotations

from measured import Table, load, percent, seconds

from remat.limits.units import format_bytes


def lengths() -> Table:
    """Return step times by budget and length, compared with a plan for that length only."""
    rows = [
        (
            budget,
            str(row["length"]),
            seconds(row["first_s"]),
            format_bytes(row["budget_bytes"]),
            format_bytes(row["peak_bytes"]),
            percent(row["overhead"]),
            f"{row['time_to_eager']:.2f}",
            f"{row['time_to_fixed']:.2f}",
        )
        for budget, section in load("lengths-cpu")["budgets"].items()
        for row in section["rows"]
    ]
    header = (
        "budget", "tokens", "first step", "allowed", "peak, measured", "extra time, planned",
        "time / eager", "time / planned for it alone",
    )  # fmt: skip
    return Table(("lengths-cpu",), header, tuple(rows))
