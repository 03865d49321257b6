"""Tables of the solver's schedules and times."""

from __future__ import annotations

from math import exp, fsum, log
from typing import Any

from measured import Table, load, percent, seconds

_NAMES = {
    "gpt4_narrow": "GPT-2, 4 narrow layers",
    "albert4_narrow": "ALBERT, 4 narrow layers",
    "gpt12": "GPT-2, 12 layers",
    "gpt48": "GPT-2, 48 layers",
    "gpt96": "GPT-2, 96 layers",
    "gpt_10000": "GPT-2, 132 layers",
    "t5": "T5, 12 + 12 layers",
    "llama32": "Llama, 32 layers",
    "swin": "Swin",
    "densenet121": "DenseNet-121",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "unet": "diffusion U-Net",
    "unet_segmentation": "segmentation U-Net",
}
_STRATEGIES = {
    "per_block": "checkpoint each block",
    "every_k": "checkpoint every k blocks",
    "chen_sqrt": "Chen, square root",
    "chen_greedy": "Chen, greedy",
    "ap_sqrt": "articulation points, square root",
    "ap_greedy": "articulation points, greedy",
    "knapsack": "knapsack (torch's budget)",
    "revolve": "Revolve",
    "rotor": "Rotor",
    "recompute_all": "recompute everything",
    "lp_rounding": "LP rounding",
}


_BUDGETS = ("70%", "50%", "35%", "20%", "min")


def traced() -> Table:
    """Return extra time, gap and solve time of traced training steps at several budgets."""
    by_graph = _by_model("solver-traced")
    rows: list[tuple[str, ...]] = []
    for graph, label in _NAMES.items():
        cells = [
            _solved(by_graph.get((graph, budget)), budget) for budget in _BUDGETS
        ]
        operations = by_graph[graph, "70%"]["operations"]
        rows.append((f"{label} ({operations:,})", *cells))
    header = ("model (operations)", *_BUDGETS[:-1], "smallest peak")
    return Table(("solver-traced",), header, tuple(rows))


def _by_model(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = load(name)["sections"]["traced"]
    return {(row["graph"], row["budget"]): row for row in rows}


def search() -> Table:
    """Return results of the searches of 2026-11-21 and 2026-11-22, on the same traces."""
    names = ("solver-traced-before", "solver-traced")
    searches = [_by_model(name) for name in names]
    rows = tuple(
        (
            label,
            budget,
            *(_solved(search.get((graph, budget)), budget) for search in searches),
        )
        for graph, label in _NAMES.items()
        for budget in _BUDGETS
    )
    return Table(names, ("model", "budget", "before", "after"), rows)


def _solved(row: dict[str, Any] | None, budget: str) -> str:
    if row is None:
        return ""
    if "overhead" not in row:
        return f"{'impossible' if row.get('proved') else 'none found'}, {seconds(row['seconds'])}"
    cell = f"{percent(row['overhead'])}, {percent(row['gap'])}, {seconds(row['seconds'])}"
    if budget == "min":
        cell = f"{row['peak_bytes'] / row['baseline_peak_bytes']:.1%}: {cell}"
    return cell


def published() -> Table:
    """Return extra time and gap on Checkmate's graphs."""
    rows = tuple(
        (
            row["graph"],
            row["budget"],
            percent(row["options"]["gap"], 3),
            percent(row["overhead"], 3),
            percent(row["gap"], 3),
            f"{row['seconds']:.2f} s",
        )
        for row in load("solver-published-random")["sections"]["published"]
    )
    header = ("graph", "budget", "gap asked", "extra time", "gap", "solved in")
    return Table(("solver-published-random",), header, rows)


def random() -> Table:
    """Return results on random layered graphs, in the file's order and with the order searched."""
    words = {"off": "as given", "on": "searched"}
    rows = tuple(
        (
            f"{row['graph']} ({row['operations']:,})",
            row["budget"],
            words[row["options"]["order"]]
            if "order" in row["options"]
            else "searched",
            percent(row["overhead"]) if "overhead" in row else _failure(row),
            percent(row["gap"]) if row.get("gap") is not None else "",
            seconds(row["seconds"]),
        )
        for row in load("solver-published-random")["sections"]["random"]
    )
    header = (
        "graph (operations)",
        "budget",
        "order",
        "extra time",
        "gap",
        "solved in",
    )
    return Table(("solver-published-random",), header, rows)


def _failure(row: dict[str, Any]) -> str:
    if row["status"] == "TIMEOUT":
        return "none found in time"
    return "impossible" if row.get("proved") else "none found"


def baselines() -> Table:
    """Return the extra time of each baseline at its own smallest peak, and remat's at that peak."""
    graphs = ("gpt12", "resnet50", "unet", "swin")
    by_strategy = {
        (row["graph"], row["strategy"]): row
        for row in load("solver-baselines")["sections"]["baselines"]
        if row["budget"] == "min" and row.get("overhead") is not None
    }
    rows: list[tuple[str, ...]] = []
    for name, label in _STRATEGIES.items():
        cells: list[str] = []
        for graph in graphs:
            row = by_strategy.get((graph, name))
            cells.append("" if row is None else _with_remat_overhead(row))
        if any(cells):
            rows.append((label, *cells))
    header = ("baseline at its smallest peak", *(_NAMES[graph] for graph in graphs))
    return Table(("solver-baselines",), header, tuple(rows))


def _with_remat_overhead(row: dict[str, Any]) -> str:
    remat_overhead = row.get("remat_overhead")
    share = row["peak_bytes"] / row["baseline_peak_bytes"]
    theirs = f"+{row['overhead']:.0%}"
    return f"{share:.0%}: {theirs}" + (
        "" if remat_overhead is None else f", remat +{remat_overhead:.0%}"
    )


def table2() -> Table:
    """Return the geometric mean of each baseline's time over remat's, on Checkmate's graphs."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in load("solver-table2")["sections"]["table2"]:
        if row.get("ratio") is not None:
            ratios.setdefault((row["strategy"], row["graph"]), []).append(
                row["ratio"]
            )
    rows = tuple(
        (label, *(_mean(ratios.get((name, graph), [])) for graph in ("CM1", "CM2")))
        for name, label in _STRATEGIES.items()
    )
    rows = tuple(row for row in rows if any(row[1:]))
    return Table(("solver-table2",), ("baseline", "CM1", "CM2"), rows)


def _mean(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return (
        f"{exp(fsum(map(log, ratios)) / len(ratios)):.3f} ({len(ratios)} budgets)"
    )
