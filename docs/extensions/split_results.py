"""Tables of steps whose largest operations run in pieces."""

from __future__ import annotations

import statistics
from typing import Any

from measured import Table, load, percent

from remat.limits.units import format_bytes


def split_models() -> Table:
    """Return the extra time of large language models by budget, without and with pieces."""
    data = load("splitting")
    budgets = list(dict.fromkeys(row["budget"] for row in data["rows"]))
    lines = {(row["model"], str(row["pieces"])): None for row in data["rows"]}
    cells = {
        (row["model"], str(row["pieces"]), row["budget"]): _planned(row)
        for row in data["rows"]
    }
    rows = [
        (
            model,
            "chosen" if pieces == "auto" else "none" if pieces == "1" else pieces,
            *(cells.get((model, pieces, budget), "") for budget in budgets),
        )
        for model, pieces in lines
    ]
    return Table(("splitting",), ("model", "pieces", *budgets), tuple(rows))


def _planned(row: dict[str, Any]) -> str:
    if not row["is_feasible"]:
        return "infeasible"
    peak = f"{percent(row['peak'])} at " if row["budget"] == "min" else ""
    pieces = {number for _, number in row.get("chosen", ())}
    chosen = f" (x {', '.join(map(str, sorted(pieces)))})" if pieces else ""
    return f"{peak}+{percent(row['overhead'])}{chosen}"


def split_steps() -> Table:
    """Return real steps at budgets that are infeasible or costly without pieces."""
    rows: list[tuple[str, ...]] = []
    for row in load("split-steps-cpu")["rows"]:
        unsplit = (
            f"infeasible below {percent(row['unsplit_min_bytes'] / row['eager_bytes'], 0)}"
            if "unsplit_min_bytes" in row
            else f"+{percent(row['unsplit_overhead'])}"
        )
        peaks = [
            f"{peak / budget:.4f}"
            for peak, budget in zip(
                row["peaks_bytes"], row["budgets_bytes"], strict=True
            )
        ]
        pieces = ", ".join(
            sorted({f"x {number}" for _, number, _ in row["splits"]})
        )
        rows.append(
            (
                row["model"],
                row["budget"],
                unsplit,
                f"+{percent(row['overhead'])} ({pieces})",
                ", ".join(peaks),
                f"{max(row['loss_differences']):.0e}",
                f"{row['largest_gradient_difference']:.0e}",
                f"{row['equal_gradients']} of {row['gradients']}",
            )
        )
    header = (
        "model", "budget", "whole", "in pieces", "peak / budget, two steps",
        "losses differ by", "gradients differ by", "gradients equal bit for bit",
    )  # fmt: skip
    return Table(("split-steps-cpu",), header, tuple(rows))


def split_peers() -> Table:
    """Return ways to avoid whole logits: peak, time and difference of gradients."""
    data = load("split-peers-cpu")["rows"]
    eager_bytes = data[0]["peak_bytes"]
    rows = [
        (
            row["method"],
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / eager_bytes:.2f}",
            f"{row['time_ratio_median']:.2f}",
            f"{row['gradient_difference']:.0e}",
        )
        if not row["failure"]
        else (row["method"], row["failure"][:100], "", "", "")
        for row in data
    ]
    header = (
        "method",
        "peak",
        "peak / eager",
        "time / eager",
        "gradients differ by",
    )
    return Table(("split-peers-cpu",), header, tuple(rows))


MAIN_LOSSES = (
    "cross_entropy", "class_weighted", "soft_cap", "dynamic_fine_tuning", "nucleus", "grpo", "gspo",
    "ppo_with_entropy_bonus", "dpo", "dpo_with_reference", "kto_with_reference", "orpo", "simpo",
    "masked_distillation", "generalized_jsd", "top_k_distillation",
)  # fmt: skip
"""The losses of the table; the file has all."""


def loss_peers() -> Table:
    """Return losses in chunks by hand, and remat at the same peak."""
    data = load("loss-peers-cpu")["rows"]
    rows: list[tuple[str, ...]] = []
    for name in MAIN_LOSSES:
        methods = {row["method"]: row for row in data if row["loss"] == name}
        eager = methods["eager"]
        for row in methods.values():
            if "budget_of" not in row or row["failure"]:
                continue
            peer = methods.get(row["budget_of"])
            cells = (
                (
                    peer["method"],
                    format_bytes(peer["peak_bytes"]),
                    f"{peer['time_ratio_median']:.2f}",
                )
                if peer
                else (f"none: {row['budget_of']}", "", "")
            )
            pieces = ", ".join(f"x {number}" for _, number in row["splits"])
            rows.append(
                (
                    name.replace("_", " "),
                    format_bytes(eager["peak_bytes"]),
                    *cells,
                    format_bytes(row["peak_bytes"]),
                    f"{row['time_ratio_median']:.2f}",
                    pieces,
                    f"{row['gradient_difference']:.0e}",
                )
            )
    header = (
        "loss", "eager", "by hand", "peak", "time / eager", "remat's peak", "time / eager",
        "pieces", "gradients differ by",
    )  # fmt: skip
    return Table(("loss-peers-cpu",), header, tuple(rows))


def split_coverage() -> Table:
    """Return by how much the smallest peak of architectures falls with pieces."""
    rows: list[tuple[str, ...]] = []
    planned = [r for r in load("coverage-cpu")["rows"] if "unsplit_min_bytes" in r]
    for kind in (*dict.fromkeys(row["kind"] for row in planned), "all"):
        members = [row for row in planned if kind in (row["kind"], "all")]
        falls = [
            1 - row["peak_bytes"] / row["unsplit_min_bytes"]
            for row in members
            if row["splits"]
        ]
        quantiles = (
            (min(falls), statistics.median(falls), max(falls)) if falls else ()
        )
        rows.append(
            (kind, str(len(members)), str(len(falls)), *map(percent, quantiles))
        )
    header = (
        "architectures", "planned whole", "split at min", "smallest fall", "median fall",
        "largest fall",
    )  # fmt: skip
    return Table(("coverage-cpu",), header, tuple(rows))
