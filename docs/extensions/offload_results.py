"""Tables of offloading."""

from __future__ import annotations

from typing import Any

from measured import Table, load

_METHODS = ("recompute", "offload", "both", "both and split")


def offloading() -> Table:
    """Return the extra time of recomputation, offloading and both, by simulation."""
    data = load("offloading")
    by_place: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in data["rows"]:
        key = row["model"], row["gpu"], row["budget"]
        by_place.setdefault(key, {})[row["method"]] = row
    rows: list[tuple[str, ...]] = []
    for (model, gpu, budget), by_method in by_place.items():
        if not any(row["is_feasible"] for row in by_method.values()):
            continue
        both = by_method["both"]
        bound = both.get("bound")
        rows.append(
            (
                f"{data['models'][model]}, {gpu.upper()}",
                budget,
                *(_extra(by_method.get(method)) for method in _METHODS),
                "" if bound is None else f"{100 * bound:+.1f}%",
                f"{both['host_bytes'] / 2**30:.1f} GiB"
                if both["is_feasible"]
                else "",
            )
        )
    header = (
        "model, GPU", "budget", "recompute", "offload", "both", "both, split", "bound",
        "on the host",
    )  # fmt: skip
    return Table(("offloading",), header, tuple(rows))


def _extra(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{100 * row['overhead']:+.1f}%" if row["is_feasible"] else "infeasible"


def offload_steps() -> Table:
    """Return the peaks and times of real steps on a CPU, with activations in a file."""
    return _steps("offload-steps-cpu")


def offload_below() -> Table:
    """Return the same at the smallest peaks with and without offloading."""
    return _steps("offload-below-cpu")


def _steps(name: str) -> Table:
    rows = tuple(
        (
            row["model"],
            row["budget"],
            row["method"],
            f"{row['peak_bytes']:,}",
            f"{row['step_s']:.2f} s",
            f"{100 * row['overhead']:+.1f}%",
            ""
            if row["method"] in ("eager", "retain")
            else f"{100 * row['predicted_overhead']:+.1f}%",
            "yes" if row["is_exact"] else "no",
        )
        for row in load(name)["rows"]
    )
    header = (
        "model", "budget", "method", "peak in bytes", "step", "over eager", "predicted",
        "bit for bit",
    )  # fmt: skip
    return Table((name,), header, rows)
