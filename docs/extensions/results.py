"""`{results} NAME`: a table made from `benchmarks/results/*.json` at every build, so that no figure
can drift from what was measured. `TABLES` is also what the tests hold README.md against."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import exp, fsum, log
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import inline, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

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
_MODELS = {"gpt2": "GPT-2, 12 layers", "resnet50": "ResNet-50", "unet2d": "UNet2D"}
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


_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|MiB)\b)")
"""Where a line must not end."""


@dataclass(frozen=True)
class Table:
    """A table and the files that it is from."""

    sources: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def load(name: str) -> dict[str, Any]:
    """The newest file of results of this name."""
    return json.loads(newest(name).read_text())


def newest(name: str) -> Path:
    """The file of results of this name with the latest date."""
    dated = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(name)}\.json")
    return max(path for path in RESULTS.iterdir() if dated.fullmatch(path.name))


def percent(share: float, digits: int = 1) -> str:
    """`0.0206` as "2.1%"; where that leaves nothing, one digit more."""
    if abs(share) < 0.00005:
        return "0%"
    if abs(share) < 0.0005:
        digits = max(digits, 2)
    return f"{100 * share:.{digits}f}%"


def seconds(time_s: float) -> str:
    """Seconds with one digit below one, else none."""
    return f"{time_s:.1f} s" if time_s < 0.95 else f"{time_s:.0f} s"


def overhead() -> Table:
    """One real step at the peak of per-block checkpointing."""
    rows: list[tuple[str, ...]] = []
    for name, found in load("overhead-cpu")["models"].items():
        methods = {method["method"]: method for method in found["methods"]}
        eager, block = methods["eager"], methods["per-block checkpoint"]
        ours = methods["remat at per-block peak"]
        cold = methods["remat at per-block peak (cold)"]
        rows.append(
            (
                _MODELS[name],
                f"{ours['peak_bytes'] / eager['peak_bytes']:.2f}",
                _step(block),
                _step(ours),
                seconds(cold["setup_s"]["total"]),
            )
        )
    header = (
        "model", "peak / eager", "per-block: extra time, FLOPs", "remat: extra time, FLOPs",
        "ready after (cold cache)",
    )  # fmt: skip
    return Table(("overhead-cpu",), header, tuple(rows))


def _step(method: dict[str, Any]) -> str:
    return f"{method['time_ratio_median'] - 1:+.0%}, {method['flops_ratio']:.2f}"


def steps() -> Table:
    """Every method of the same run."""
    rows: list[tuple[str, ...]] = []
    for name, found in load("overhead-cpu")["models"].items():
        eager = found["methods"][0]
        for method in found["methods"]:
            label = method["method"]
            if label.endswith("(cold)") or label in (
                "torch budget 0",
                "remat at peak of torch budget 0",
            ):
                continue  # see benchmarks/results/README.md: void, or the same step again
            flops = method["flops_ratio"]
            rows.append(
                (
                    _MODELS[name],
                    label,
                    f"{method['peak_bytes'] / 2**20:,.0f} MiB",
                    f"{method['peak_bytes'] / eager['peak_bytes']:.2f}",
                    f"{method['time_ratio_median']:.2f}",
                    "not counted" if flops is None else f"{flops:.2f}",
                )
            )
    header = (
        "model",
        "method",
        "peak",
        "peak / eager",
        "time / eager",
        "FLOPs / eager",
    )
    return Table(("overhead-cpu",), header, tuple(rows))


_BUDGETS = ("70%", "50%", "35%", "20%", "min")


def traced() -> Table:
    """Training steps of models: extra time, gap, seconds to solve."""
    found = _by_model("solver-traced")
    rows: list[tuple[str, ...]] = []
    for graph, label in _NAMES.items():
        cells = [_solved(found.get((graph, budget)), budget) for budget in _BUDGETS]
        operations = found[graph, "70%"]["operations"]
        rows.append((f"{label} ({operations:,})", *cells))
    header = ("model (operations)", *_BUDGETS[:-1], "smallest peak")
    return Table(("solver-traced",), header, tuple(rows))


def _by_model(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = load(name)["sections"]["traced"]
    return {(row["graph"], row["budget"]): row for row in rows}


def search() -> Table:
    """The search of 2026-11-21 and that of decisions 25 and 26, on the same traces and machine."""
    names = ("solver-traced-before", "solver-traced")
    found = [_by_model(name) for name in names]
    rows = tuple(
        (
            label,
            budget,
            *(_solved(each.get((graph, budget)), budget) for each in found),
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


def peers() -> Table:
    """remat at the peaks that Rockmate reached, run and metered."""
    rows: list[tuple[str, ...]] = []
    measured = {
        (row["graph"], row["peak_ratio"], row["rockmate_flops"]): row
        for row in load("solver-peers-measured")["sections"]["peers"]
        if row.get("rockmate_flops")
    }
    for row in load("solver-peers")["sections"]["peers"]:
        if row["method"] == "per-block checkpoint":
            rows.append(
                (
                    row["graph"],
                    row["method"],
                    f"{row['peak_to_eager']:.2f}",
                    f"{row['flops_to_eager']:.3f}",
                    "",
                    "",
                    "",
                )
            )
        elif row.get("rockmate_flops"):
            other = measured[row["graph"], row["peak_ratio"], row["rockmate_flops"]]
            rows.append(
                (
                    row["graph"],
                    "remat",
                    f"{row['peak_to_eager']:.2f}",
                    f"{row['flops_to_eager']:.3f}",
                    f"{other['flops_to_eager']:.3f}",
                    f"{row['rockmate_flops']:.3f}",
                    f"{row['setup_s']:.0f} s",
                )
            )
    header = (
        "model", "method", "peak / eager", "FLOPs / eager (FLOPs as costs)",
        "FLOPs / eager (measured costs)", "Rockmate's FLOPs / eager", "ready after",
    )  # fmt: skip
    return Table(("solver-peers", "solver-peers-measured"), header, tuple(rows))


def published() -> Table:
    """Checkmate's graphs."""
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
    """Random layered graphs, in the order given and in a better one."""
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


def compiled() -> Table:
    """Ways to save memory under torch.compile."""
    rows = tuple(
        (
            row["method"],
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['peak_to_inductor']:.3f}",
            f"{row['time_to_inductor']:.2f}",
            f"{row['gradient_error']:.0e}" if "gradient_error" in row else "",
            seconds(sum(row["setup_s"].values())),
        )
        for found in load("compiled-cpu")["models"].values()
        for row in found["methods"]
    )
    header = (
        "method", "peak", "peak / inductor", "time / inductor", "gradients off by",
        "compiled in",
    )  # fmt: skip
    return Table(("compiled-cpu",), header, rows)


def baselines() -> Table:
    """Each baseline at its own smallest peak, and remat there."""
    graphs = ("gpt12", "resnet50", "unet", "swin")
    found = {
        (row["graph"], row["strategy"]): row
        for row in load("solver-baselines")["sections"]["baselines"]
        if row["budget"] == "min" and row.get("overhead") is not None
    }
    rows: list[tuple[str, ...]] = []
    for name, label in _STRATEGIES.items():
        cells: list[str] = []
        for graph in graphs:
            row = found.get((graph, name))
            cells.append("" if row is None else _beside(row))
        if any(cells):
            rows.append((label, *cells))
    header = ("baseline at its smallest peak", *(_NAMES[graph] for graph in graphs))
    return Table(("solver-baselines",), header, tuple(rows))


def _beside(row: dict[str, Any]) -> str:
    ours = row.get("remat_overhead")
    share = row["peak_bytes"] / row["baseline_peak_bytes"]
    theirs = f"+{row['overhead']:.0%}"
    return f"{share:.0%}: {theirs}" + (
        "" if ours is None else f", remat +{ours:.0%}"
    )


def table2() -> Table:
    """Time of the baselines over that of remat on Checkmate's graphs: geometric means."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in load("solver-table2")["sections"]["table2"]:
        if row.get("ratio") is not None:
            found.setdefault((row["strategy"], row["graph"]), []).append(
                row["ratio"]
            )
    rows = tuple(
        (label, *(_mean(found.get((name, graph), [])) for graph in ("CM1", "CM2")))
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


def service() -> Table:
    """The service under load, killed, and beside the library."""
    stores = [
        load(f"service-{store}")["sections"] for store in ("sqlite", "postgresql")
    ]

    def line(what: str, tell: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return (what, *(tell(sections) for sections in stores))

    rows = (
        line(
            "jobs by clients",
            lambda s: f"{s['load']['jobs']} by {s['load']['clients']}",
        ),
        line("all done after", lambda s: f"{s['load']['done_in_s']:.0f} s"),
        line(
            "`GET /jobs/{id}` meanwhile, p50",
            lambda s: f"{1000 * s['load']['look_p50_s']:.0f} ms",
        ),
        line(
            "`GET /jobs/{id}` meanwhile, p99",
            lambda s: f"{1000 * s['load']['look_p99_s']:.0f} ms",
        ),
        line("kill -9 of server and worker", lambda s: _kills(s["kill"])),
        line(
            "of jobs accepted, finished once and right",
            lambda s: (
                f"{s['kill']['finished_once_and_right']} of {s['kill']['accepted']}"
            ),
        ),
        line(
            "1,523 operations, known answer by HTTP",
            lambda s: f"{1000 * s['overhead']['http_cached_s']:.0f} ms",
        ),
        line(
            "the same, known answer by `remat.Client`",
            lambda s: f"{s['overhead']['client_cached_s']:.2f} s",
        ),
        line(
            "fresh, more than the library takes, by HTTP",
            lambda s: f"{s['overhead']['http_fresh_over_library_s']:.2f} s",
        ),
        line(
            "fresh, more than the library takes, by `remat.Client`",
            lambda s: f"{s['overhead']['client_fresh_over_library_s']:.2f} s",
        ),
    )
    return Table(
        ("service-sqlite", "service-postgresql"), ("", "SQLite", "PostgreSQL"), rows
    )


def _kills(kill: dict[str, Any]) -> str:
    return f"{kill['kills_of_the_server']} + {kill['kills_of_the_worker']} times"


TABLES: dict[str, Callable[[], Table]] = {
    made.__name__: made
    for made in (
        overhead,
        steps,
        traced,
        search,
        peers,
        compiled,
        published,
        random,
        baselines,
        table2,
        service,
    )
}


def markdown(found: Table) -> Iterable[str]:
    """The lines of the table in Markdown."""
    yield "| " + " | ".join(found.header) + " |"
    yield "| " + " | ".join("---" for _ in found.header) + " |"
    for row in found.rows:
        yield "| " + " | ".join(row) + " |"


class Results(SphinxDirective):
    """The table, and where it is from."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Table and source."""
        found = TABLES[self.arguments[0]]()
        for name in found.sources:
            self.env.note_dependency(str(newest(name)))
        files = ", ".join(
            f"`benchmarks/results/{newest(name).name}`" for name in found.sources
        )
        machine = load(found.sources[0])["machine"]
        told = (
            f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
        )
        words = f"Source: {files}; {told}."
        source = nodes.paragraph("", "", *inline(words), classes=["source"])
        rows = [
            [_UNIT.sub("\N{NO-BREAK SPACE}", cell) for cell in row]
            for row in found.rows
        ]
        return [table(found.header, rows), source]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
