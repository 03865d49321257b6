"""Benchmark of remat against eager mode, per-block checkpointing and torch's own budget.

    python -m benchmarks.overhead                       # all models, on CUDA if available
    python -m benchmarks.overhead --models gpt2 --quick

All methods share one set of parameters and run interleaved in one process. remat runs at exactly
the peaks that the other methods reach, so that times are compared at equal memory. Finally it
prints which of the project's aims are met.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import report
from benchmarks.harness.measurement import interleaved_step_times, measure_usage, time_summary
from benchmarks.harness.methods import (
    Method,
    eager_method,
    per_block_method,
    remat_method,
    torch_budget_method,
    try_method,
)
from benchmarks.harness.run_models import run_models
from benchmarks.models.workloads import WORKLOADS, Workload

KEEP_ALL = "remat 100%"
AT_BLOCKS = "remat at per-block peak"
COLD = f"{AT_BLOCKS} (cold)"
PER_BLOCK = "per-block checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark for each model, print tables and aims, and write the result file."""
    options = _options(argv)

    def benchmark_model(name: str, workload: Workload, device: torch.device) -> dict[str, Any]:
        rows = run(workload, device, options)
        aims = check_aims(name, rows)
        report.print_table(f"{name}: {workload.size}", rows)
        for aim in aims:
            print(f"  {'met   ' if aim['met'] else 'MISSED'} {aim['aim']}: {aim['observed']}")
        return {"methods": rows, "aims": aims}

    facts = {
        "units": "bytes, seconds; ratios are to eager mode, of the same round",
        "peak": "max_memory_allocated, warm"
        if torch.device(options.device).type == "cuda"
        else "live storages, with parameters, buffers, gradients and batch; for compiled methods "
        "allocated bytes, because the meter cannot see into their graphs",
    }
    return run_models("overhead", options, facts, WORKLOADS, benchmark_model)


def run(workload: Workload, device: torch.device, options: argparse.Namespace) -> list[report.Row]:
    """Return the measured row of each method, eager first."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = str(Path(scratch) / "costs.sqlite")

        def remat_at(name: str, budget: int | str) -> Method:
            return try_method(
                name, lambda: remat_method(workload, name, budget, options.time_limit, cache)
            )

        peers = [eager_method(workload), try_method(PER_BLOCK, lambda: per_block_method(workload))]
        for share in options.torch_budgets:
            peers.append(
                try_method(
                    f"torch budget {share:g}",
                    lambda share=share: torch_budget_method(workload, share, options.torch_backend),
                )
            )
        rows = {method.name: _measured_row(method, workload, device) for method in peers}
        remat_methods: list[Method] = []
        block_peak = rows[PER_BLOCK].get("peak_bytes")
        if block_peak:
            # The first plan starts with an empty cost cache, the second one with a full one.
            rows[COLD] = _setup_row(remat_at(COLD, block_peak))
            remat_methods.append(remat_at(AT_BLOCKS, block_peak))
        remat_methods.append(remat_at(KEEP_ALL, "100%"))
        for method in peers[2:]:
            peak = rows[method.name].get("peak_bytes")
            if peak and peak < rows["eager"]["peak_bytes"]:
                remat_methods.append(remat_at(f"remat at peak of {method.name}", peak))
        for method in remat_methods:
            rows[method.name] = _measured_row(method, workload, device)
    running = [m for m in (*peers, *remat_methods) if not rows[m.name]["failure"]]
    times = interleaved_step_times(running, workload, device, options.rounds)
    for method in running:
        rows[method.name] |= time_summary(times, method.name)
        flops = rows[method.name]["flops"]
        rows[method.name]["flops_ratio"] = flops and flops / rows["eager"]["flops"]
    return [row for row in rows.values() if row["method"] != COLD] + [
        row for row in rows.values() if row["method"] == COLD
    ]


def _measured_row(method: Method, workload: Workload, device: torch.device) -> report.Row:
    """Return a method's set-up row with the measured peak and FLOPs."""
    row = _setup_row(method)
    if method.failure:
        return row
    try:
        use = measure_usage(method, workload, device)
    except Exception as error:  # a compiled method may fail only here
        return row | {"failure": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
    return row | {"peak_bytes": use.peak_bytes, "flops": use.flops}


def _setup_row(method: Method) -> report.Row:
    """Return the figures of a method's set-up."""
    return {
        "method": method.name,
        "failure": method.failure,
        "budget_bytes": method.budget_bytes,
        "setup_s": method.setup_s,
        **method.facts,
    }


def check_aims(model: str, rows: list[report.Row]) -> list[dict[str, Any]]:
    """Return the project's aims that these rows decide, each with its outcome."""
    by_name = {row["method"]: row for row in rows}
    aims: list[dict[str, Any]] = []

    def aim(text: str, met: bool, observed: str) -> None:
        aims.append({"aim": text, "met": met, "found": observed})

    remat_rows = [r for r in rows if r["method"].startswith("remat") and "step_s" in r]
    worst = max((r["peak_bytes"] / r["budget_bytes"] for r in remat_rows), default=0.0)
    aim("never above the budget", bool(remat_rows) and worst <= 1, f"at most {worst:.4f} of it")
    blocks, at_blocks = by_name[PER_BLOCK], by_name.get(AT_BLOCKS, {})
    if "step_s" in blocks and "step_s" in at_blocks:
        per_block_extra, extra = blocks["time_ratio_median"] - 1, at_blocks["time_ratio_median"] - 1
        aim(
            "extra time at the per-block peak at most 0.85 of per-block's",
            extra <= 0.85 * per_block_extra,
            f"{extra:.1%} against {per_block_extra:.1%} of eager's step",
        )
    else:
        aim("extra time at the per-block peak", False, str(at_blocks.get("failure")))
    keep = by_name[KEEP_ALL]
    if "step_s" in keep:
        ratio = keep["time_ratio_median"]
        aim("keeping everything takes at most 1.02 of eager", ratio <= 1.02, f"{ratio:.3f}")
    if model == "gpt2":
        for name, limit in ((COLD, 60.0), (AT_BLOCKS, 20.0)):
            total = by_name.get(name, {}).get("setup_s", {}).get("total")
            kind = "cold" if name == COLD else "warm"
            aim(
                f"set-up with a {kind} cost cache under {limit:.0f} s",
                total is not None and total < limit,
                "not set up" if total is None else f"{total:.1f} s",
            )
    return aims


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="small models, few runs, to test this command")
    add("--rounds", type=int, help="timed steps of each method (default 9; 3 if quick)")
    add("--torch-budgets", nargs="*", type=float, help="activation_memory_budget values")
    add("--torch-backend", default="aot_eager_decomp_partition", help="backend of torch.compile")
    add("--time-limit", type=float, help="seconds for each solve (default 60; 15 if quick)")
    add("--threads", type=int, help="CPU threads of torch")
    add("--out", help="folder for the result (default benchmarks/results; if quick, none)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.rounds = options.rounds or (3 if quick else 9)
    options.time_limit = options.time_limit or (15.0 if quick else 60.0)
    if options.torch_budgets is None:
        options.torch_budgets = [0.5] if quick else [0.8, 0.5, 0.2, 0.0]
    return options


if __name__ == "__main__":
    raise SystemExit(main())
