"""Tables of published measurements against the predictions of `remat fit`."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from measured import Table, load, percent

_FILE = "fit-world"
_MISSED = 0.05


def fit_world() -> Table:
    """Return, for each source, the errors of the predictions: their median and the worst."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rows = [row for row in load(_FILE)["rows"] if "error" in row]
    for row in rows:
        groups[row["source"]].append(row)
    groups["all"] = rows
    cells = tuple(
        (
            source,
            str(len(group)),
            ", ".join(dict.fromkeys(row["measured"] for row in group)),
            percent(median(row["error"] for row in group), 1),
            percent(max(row["error"] for row in group), 1),
            str(sum(row["error"] <= _MISSED for row in group)),
        )
        for source, group in groups.items()
    )
    header = ("source", "rows", "measured", "error, median", "worst", "within 5%")
    return Table((_FILE,), header, cells)


def fit_world_missed() -> Table:
    """Return the rows that are more than 5% off, with the reasons that are known."""
    rows = [row for row in load(_FILE)["rows"] if row.get("error", 0) > _MISSED]
    cells = tuple(
        (
            row["source"],
            row["name"],
            f"{row['predicted_bytes'] / 1e9:.1f}",
            f"{(row['published_bytes'] - row.get('other_bytes', 0)) / 1e9:.1f}",
            row.get("reason", "unknown"),
        )
        for row in rows
    )
    return Table(
        (_FILE,), ("source", "row", "predicted, GB", "published", "reason"), cells
    )
