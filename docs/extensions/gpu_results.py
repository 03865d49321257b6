"""Tables of the acceptance run on a GPU."""

from __future__ import annotations

from typing import Any

from measured import Table, load

_FILE = "gpu-nvidia-h200"


def gpu_steps() -> Table:
    """Return one line for each step: its checks that are met, missed, and not made."""
    rows = []
    for step in load(_FILE)["steps"]:
        verdicts = [
            row["verdict"] for part in step["parts"] for row in part["rows"]
        ]
        counts = [
            str(verdicts.count(verdict)) for verdict in ("met", "missed", "skipped")
        ]
        rows.append((str(step["step"]), step["title"], *counts))
    return Table(
        (_FILE,), ("step", "what", "met", "missed", "not made"), tuple(rows)
    )


def gpu_times() -> Table:
    """Return the figures of the steps that measure time or bandwidth."""
    rows = tuple(
        (part["name"], row["subject"], row["requirement"], row["observed"])
        for step in load(_FILE)["steps"]
        if step["step"] in (6, 7, 8, 11, 12, 13, 15)
        for part in step["parts"]
        for row in part["rows"]
        if _is_figure(row)
    )
    return Table((_FILE,), ("model", "what", "required", "measured"), rows)


def gpu_missed() -> Table:
    """Return the checks that are missed."""
    rows = tuple(
        (str(step["step"]), part["name"], row["subject"], row["observed"][:240])
        for step in load(_FILE)["steps"]
        for part in step["parts"]
        for row in part["rows"]
        if row["verdict"] == "missed"
    )
    return Table((_FILE,), ("step", "part", "check", "observed"), rows)


def _is_figure(row: dict[str, Any]) -> bool:
    """True for a row with a time, a bandwidth or a peak."""
    is_loss = row["subject"].endswith("loss") or row["subject"].startswith(
        "gradients"
    )
    return row["verdict"] not in ("missed", "skipped") and not is_loss
