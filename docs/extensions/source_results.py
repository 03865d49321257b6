"""Tables of published figures with those of remat for the same step."""

from __future__ import annotations

from typing import Any

from measured import Table, load

_METHODS = ("recompute", "pieces", "offload")


def sources() -> Table:
    """Return published peaks and times, the predicted ones, and those of plans at these peaks."""
    data = load("sources")
    rows: list[tuple[str, ...]] = []
    for row in data["rows"]:
        case = data["cases"][row["case"]]
        plans: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for plan in row["plans"]:
            plans.setdefault((plan["kind"], plan["at"]), {})[plan["method"]] = plan
        described: tuple[str, ...] = ()
        for (_, name), by_method in plans.items():
            cells = (
                _step_and_gpu(case),
                _published(case, name),
                _predicted(row, name),
            )
            rows.append(
                (
                    *(("", "", "") if cells == described else cells),
                    _gb(by_method[_METHODS[0]]["at_bytes"]),
                    *(_planned(by_method[method]) for method in _METHODS),
                )
            )
            described = cells
    header = (
        "step, GPU", "published", "predicted", "plans within", "recompute", "and pieces",
        "and offload",
    )  # fmt: skip
    return Table(("sources",), header, tuple(rows))


def _published(case: dict[str, Any], name: str) -> str:
    """Return the published figures of eager mode and of a method, with its extra time."""
    points = {point["method"]: point for point in case["points"]}
    first, point = case["points"][0], points.get(name)
    if point is None:
        return ""
    eager = "" if first is point else f"{_figures(first)} -> "
    extra = "" if point["extra"] is None else f" ({_extra(point['extra'])})"
    return f"{eager}{name}: {_figures(point)}{extra}"


def _figures(point: dict[str, Any]) -> str:
    return point["as_published"] or _gb(point["peak_bytes"])


def _predicted(row: dict[str, Any], name: str) -> str:
    """Return the predicted peaks of eager mode and of checkpoints, with their extra time. A head
    has no checkpoints, but the time of eager mode."""
    eager, checkpoints = _gb(row["eager"]["peak_bytes"]), row["checkpoints"]
    if checkpoints is None:
        return f"{eager}, {1000 * row['eager']['step_s']:.0f} ms"
    size_bytes, extra = checkpoints["peak_bytes"], checkpoints["overhead"]
    if name == "selective":
        return eager
    if name.endswith("offloaded inputs"):
        size_bytes = next(p["at_bytes"] for p in row["plans"] if p["at"] == name)
        extra += row["copies_s"] / row["eager"]["step_s"]
    return f"{eager} -> {name}: {_gb(size_bytes)}, {_extra(extra)}"


def source_sizes() -> Table:
    """Return the largest batch or context within the published peak of the checkpoints."""
    data = load("sources")
    rows: list[tuple[str, ...]] = []
    for row in data["rows"]:
        case, largest = data["cases"][row["case"]], row["largest"]
        if largest is None:
            continue
        cells = [_size(case, largest[name]) for name in ("checkpoints", "as_fast")]
        published = case["size_unit"].format(case["size"])
        rows.append((case["title"], _gb(largest["limit_bytes"]), published, *cells))
    header = (
        "step", "memory", "published size, as assumed", "checkpoints", "plans",
    )  # fmt: skip
    return Table(("sources",), header, tuple(rows))


def source_assumptions() -> Table:
    """Return where the figures are from, and what is assumed for each step."""
    cases = load("sources")["cases"].values()
    rows = tuple(
        (
            case["title"],
            f"{case['source']}, read on {case['read_on']}"
            if case["address"]
            else case["source"],
            case["size_unit"].format(case["size"]),
            "; ".join(case["assumptions"]),
        )
        for case in cases
    )
    return Table(
        ("sources",), ("step", "figures from", "size", "assumed by us"), rows
    )


def _size(case: dict[str, Any], row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    least = "at least " if row["too_large"] is None else ""
    return (
        f"{least}{case['size_unit'].format(row['size'])}, {_extra(row['overhead'])}"
    )


def _planned(plan: dict[str, Any]) -> str:
    """Return a plan's extra time, with its bound in parentheses."""
    if not plan["is_feasible"]:
        return (
            "infeasible" if plan["failure"] == "InfeasibleBudget" else "none found"
        )
    bound = "" if plan["bound"] is None else f" ({_extra(plan['bound'])})"
    return f"{_extra(plan['overhead'])}{bound}"


def _extra(share: float) -> str:
    return f"{100 * share:+.1f}%" if abs(share) < 1 else f"{100 * share:+.0f}%"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def _step_and_gpu(case: dict[str, Any]) -> str:
    gpu = case["gpu"].upper().replace("RTX", "RTX ")
    return case["title"] if gpu in case["title"] else f"{case['title']}, {gpu}"
