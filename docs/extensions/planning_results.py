"""Table of the time that planning takes."""

from __future__ import annotations

import statistics

from measured import Table, load

_CASES = {
    "ready_cold": "GPT-2, 12 layers, ready to train; empty cost cache",
    "ready_warm": "the same with the costs cached",
    "trace96": "trace of GPT-2 with 96 layers",
}


def planning() -> Table:
    """Return the median seconds of each case, before and after a change."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in load("planning-ready-cpu")["rows"]:
        seconds.setdefault((row["case"], row["code"]), []).append(row["wall_s"])
    rows = [
        (
            label,
            *(
                f"{statistics.median(seconds[case, code]):.1f} s"
                for code in ("before", "after")
            ),
        )
        for case, label in _CASES.items()
    ]
    return Table(("planning-ready-cpu",), ("case", "before", "after"), tuple(rows))
