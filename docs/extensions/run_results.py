"""Tables of measured training steps, and of the service."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from measured import Table, load, seconds

_MODELS = {"gpt2": "GPT-2, 12 layers", "resnet50": "ResNet-50", "unet2d": "UNet2D"}

_FAMILIES = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "qwen3_moe": "Qwen3-MoE",
    "bert": "BERT",
    "t5": "T5",
    "vit": "ViT",
    "resnet": "ResNet",
    "unet2d": "UNet2D",
}


def overhead() -> Table:
    """Return extra time and FLOPs of a measured step at the peak of per-block checkpointing."""
    rows: list[tuple[str, ...]] = []
    for name, section in load("overhead-cpu")["models"].items():
        methods = {method["method"]: method for method in section["methods"]}
        eager, block = methods["eager"], methods["per-block checkpoint"]
        remat_row = methods["remat at per-block peak"]
        cold = methods["remat at per-block peak (cold)"]
        rows.append(
            (
                _MODELS[name],
                f"{remat_row['peak_bytes'] / eager['peak_bytes']:.2f}",
                _step(block),
                _step(remat_row),
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
    """Return peak, time and FLOPs of each method of the overhead benchmark."""
    rows: list[tuple[str, ...]] = []
    for name, section in load("overhead-cpu")["models"].items():
        eager = section["methods"][0]
        for method in section["methods"]:
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


def compiled() -> Table:
    """Return peak and time of the methods to save memory under torch.compile."""
    rows: list[tuple[str, ...]] = []
    for section in load("compiled-cpu")["models"].values():
        model = section["size"].partition(",")[0]
        for row in section["methods"]:
            rows.append((model, row["method"], *_compiled_cells(row)))
    header = (
        "model", "method", "peak", "peak / inductor", "budget", "time / inductor",
        "gradients off by", "compiled in",
    )  # fmt: skip
    return Table(("compiled-cpu",), header, tuple(rows))


def at_peaks() -> Table:
    """Return remat at the peaks that torch's budgets reach under torch.compile."""
    rows: list[tuple[str, ...]] = []
    for section in load("compiled-at-peaks-cpu")["models"].values():
        by_name = {row["method"]: row for row in section["methods"]}
        for row in section["methods"]:
            if "time_to_torch" not in row:
                continue
            torchs = by_name[row["method"].partition(" of ")[2]]
            cells = [
                section["size"].partition(",")[0],
                torchs["method"].split()[-1],
            ]
            for one in (torchs, row):
                cells.append(f"{one['peak_to_inductor']:.3f}")
                cells.append(f"{one['time_to_inductor']:.2f}")
                cells.append(f"{one['gradient_error']:.0e}")
            rows.append((*cells, f"{row['time_to_torch']:.2f}"))
    header = (
        "model", "torch's budget", "its peak", "its time", "its gradients off by", "remat's peak",
        "its time", "its gradients off by", "remat's time / torch's",
    )  # fmt: skip
    return Table(("compiled-at-peaks-cpu",), header, tuple(rows))


def compile_time() -> Table:
    """Return the time of the first step under torch.compile, and the time that planning adds."""
    rows: list[tuple[str, ...]] = []
    for name, methods in load("compile-time-cpu")["models"].items():
        plain = methods[0]
        for row in methods[1:]:
            rows.append(
                (
                    _FAMILIES[name],
                    str(sum(plan["operations"] for plan in row["plans"])),
                    row["method"],
                    seconds(plain["total_s"]),
                    f"{row['extra_s']:+.1f} s",
                    seconds(sum(plan["planned_s"] for plan in row["plans"])),
                    f"{seconds(row['warm_s'])}, {row['warm_rounds']} planned",
                )
            )
    header = (
        "model", "operations", "budget", "first step with plain Inductor", "with remat",
        "planning", "second process",
    )  # fmt: skip
    return Table(("compile-time-cpu",), header, tuple(rows))


def training() -> Table:
    """Return peak, time and losses of fifty steps of Transformers' Trainer by each method."""
    rows: list[tuple[str, ...]] = []
    for section in load("training-cpu")["models"].values():
        model = section["size"].partition(",")[0] + (
            ", LoRA" if "LoRA" in section["size"] else ""
        )
        for row in section["methods"]:
            error = row["loss_error"]
            rows.append(
                (
                    model,
                    row["method"],
                    f"{row['peak_bytes'] / 2**20:.0f} MiB, {row['peak_to_eager']:.2f}",
                    f"{row['time_to_eager']:.2f}",
                    f"{row['per_s']:,.0f} {row['unit']}",
                    "equal" if error == 0 else f"within {error:.0e}",
                )
            )
    header = (
        "model",
        "method",
        "peak, of eager's",
        "time / eager",
        "a second",
        "losses",
    )
    return Table(("training-cpu",), header, tuple(rows))


def _compiled_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["failure"]:
        smallest = re.search(
            r"Pass a budget of at least ([\d,]+) bytes", row["failure"]
        )
        least = (
            f"infeasible below {int(smallest[1].replace(',', '')) / 2**20:,.0f} MiB"
            if smallest
            else ""
        )
        if "no schedule within" in row["failure"]:
            least = "none found"
        return (least or "failed", "", "", "", "", "")
    budget_outcome = {True: "kept", False: "exceeded", None: ""}[
        row.get("within_budget")
    ]
    return (
        f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        f"{row['peak_to_inductor']:.3f}",
        budget_outcome,
        f"{row['time_to_inductor']:.2f}",
        f"{row['gradient_error']:.0e}" if "gradient_error" in row else "",
        seconds(sum(row["setup_s"].values())),
    )


def peers() -> Table:
    """Return measured steps of remat at the peaks that Rockmate reached."""
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


def service() -> Table:
    """Return figures of the service under load, after kill -9, and against the library."""
    stores = [
        load(f"service-{store}")["sections"] for store in ("sqlite", "postgresql")
    ]

    def line(what: str, cell: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return (what, *(cell(sections) for sections in stores))

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
