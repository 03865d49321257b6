"""Tables of what the software GPU showed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from measured import Table, load, percent

_FILE = "software-gpu-h100"
_TRAINING_FILE = "software-gpu-training-h100"
_ERRORS = {
    "error": "peak",
    "reserved_error": "reserved",
    "expandable_error": "reserved, expandable segments",
}
"""The keys of relative errors, with what they are errors of."""
_WHATS = {
    "eager": "eager mode and `remat.estimate`",
    "optimize": "`remat.optimize`",
    "enable": "`remat.enable` by blocks",
    "dropped": 'optimize, `outputs="dropped"`',
    "loss": 'optimize, `outputs="loss"`',
    "accumulation": "optimize, accumulating",
}


_NAMES = (
    "family", "model", "file", "case", "dtype", "what", "property", "budget", "mode", "fault",
    "architecture",
)  # fmt: skip
"""The keys of a row that name its case."""
_NOT_RUN = "not run"


def software_gpu() -> Table:
    """Return one line for each table: its rows, those that meet the requirement, and how many of
    these are refusals of a budget or have an explained difference."""
    rows = []
    for entry in load(_FILE)["tables"].values():
        met = [row for row in entry["rows"] if row["is_met"]]
        refused = sum("refused" in row for row in met)
        explained = sum(
            bool(row.get("differences") and row.get("note")) for row in met
        )
        counts = (len(entry["rows"]), len(met), refused, explained)
        rows.append((entry["title"], entry["requirement"], *map(str, counts)))
    header = (
        "table",
        "requirement",
        "rows",
        "met",
        "of these refused",
        "of these explained",
    )
    return Table((_FILE,), header, tuple(rows))


def software_gpu_memory() -> Table:
    """Return the requested bytes of eager plans as shares of the prediction, by family."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in load(_FILE)["tables"]["eager-memory"]["rows"]:
        if "family" in row:
            groups[row["family"], row["what"]].append(row)
    families = dict.fromkeys(family for family, _ in groups)
    rows = tuple(
        (family, *(_shares(groups[family, what]) for what in _WHATS))
        for family in families
    )
    return Table((_FILE,), ("family", *_WHATS.values()), rows)


def software_gpu_budgets() -> Table:
    """Return, for each budget of the eager plans, how many rows have a plan and how many are
    refusals."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in load(_FILE)["tables"]["eager-memory"]["rows"]:
        if row.get("budget"):
            groups[row["budget"]].append(row)
    rows = tuple(
        (
            budget,
            str(sum("refused" not in row for row in group)),
            str(sum("refused" in row for row in group)),
        )
        for budget, group in groups.items()
    )
    return Table((_FILE,), ("budget", "plans", "refused"), rows)


def software_gpu_missed() -> Table:
    """Return the rows that miss their requirement, and how many cases were not run."""
    rows: list[tuple[str, ...]] = []
    for name, entry in load(_FILE)["tables"].items():
        missed = [row for row in entry["rows"] if not row["is_met"]]
        not_run = [row["case"] for row in missed if row.get("why") == _NOT_RUN]
        rows += [
            (name, _subject(row), _figures(row))
            for row in missed
            if row.get("why") != _NOT_RUN
        ]
        if not_run:
            rows.append(
                (name, f"{len(not_run)} cases", f"{_NOT_RUN}: {', '.join(not_run)}")
            )
    return Table((_FILE,), ("table", "case", "figures"), tuple(rows))


def software_gpu_training() -> Table:
    """Return the errors of the predictions of fit by optimizer: their median and the worst."""
    return _errors_by("optimizer")


def software_gpu_training_families() -> Table:
    """Return the same by family, for loops without checkpoints and with them."""
    return _errors_by("family")


def _errors_by(key: str) -> Table:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rows = load(_TRAINING_FILE)["tables"]["training-memory"]["rows"]
    for row in rows:
        if "error" in row:
            groups[row[key]].append(row)
    groups["all"] = [row for row in rows if "error" in row]
    header = [key, "loops"]
    for name in _ERRORS.values():
        header += [f"{name}, median", "worst"]
    cells = tuple(
        (
            group,
            str(len(group_rows)),
            *(
                _error(group_rows, e, how)
                for e in _ERRORS
                for how in (_median, _worst)
            ),
        )
        for group, group_rows in groups.items()
    )
    return Table((_TRAINING_FILE,), tuple(header), cells)


def _error(
    rows: list[dict[str, Any]],
    name: str,
    aggregate: Callable[[list[float]], float],
) -> str:
    """Return one figure of the errors with this name; some rows do not have it."""
    errors = [row[name] for row in rows if name in row]
    return percent(aggregate(errors), 2) if errors else ""


def _median(errors: list[float]) -> float:
    return median(map(abs, errors))


def _worst(errors: list[float]) -> float:
    """Return the error with the largest absolute value, with its sign."""
    return max(errors, key=abs)


def _shares(rows: list[dict[str, Any]]) -> str:
    """Return the smallest and the largest share of the prediction that was requested."""
    shares = [
        size / row["predicted_bytes"]
        for row in rows
        for size in row.get("requested_bytes", ())
    ]
    if not shares:
        return "no plan"
    return f"{100 * min(shares):.2f} to {100 * max(shares):.2f}%"


def _subject(row: dict[str, Any]) -> str:
    return " ".join(str(row[name]) for name in _NAMES if row.get(name))


def _figures(row: dict[str, Any]) -> str:
    """Return what a row says of its miss."""
    for name in ("why", "refused"):
        if row.get(name):
            return str(row[name])[:200]
    if row.get("share"):
        return f"{100 * row['share']:.2f}% of {row['predicted_bytes']:,} predicted bytes"
    if "margin_bytes" in row:
        return f"{-row['margin_bytes']:,} bytes above {row['verified_bytes']:,} verified"
    if row.get("noticed"):
        return f"noticed, without a fault: {row['noticed']}"
    if row.get("differences"):
        return f"{row['difference_count']} differences: {row['differences'][0]}"[
            :200
        ]
    if row.get("failed"):
        return f"failed: {', '.join(row['failed'])}"
    return "; ".join(
        f"{k}: {v}" for k, v in row.items() if k not in (*_NAMES, "is_met")
    )[:200]
