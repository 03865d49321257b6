"""Benchmark of the time that torch.compile takes with remat's backend and with plain Inductor.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --models gpt2 --budgets 60%

Each first step runs in a process of its own: once with empty caches, and once with the caches that
the first process filled. Imports, and Inductor's work once per process, are not counted: a small
function is compiled before.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.harness import machine, report
from benchmarks.harness.methods import copy_sharing_parameters, run_step
from benchmarks.models.families import FAMILIES
from remat.report.report import Table

INDUCTOR = "inductor"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, print its table, and write the result file."""
    options = _options(argv)
    if options.one:
        print(json.dumps(_first_step(options.models[0], options.one)))
        return 0
    result: dict[str, Any] = {
        "benchmark": "compile-time",
        "units": "seconds; of cold ones the least of the rounds",
        "machine": machine.describe(torch.device("cpu")),
        "models": {},
    }
    for name in options.models:
        result["models"][name] = rows = _compare_methods(name, options)
        _print_rows(name, rows)
        if options.out:
            print(report.write_result(Path(options.out), "compile-time-cpu", result), flush=True)
    return 0


def _compare_methods(name: str, options: argparse.Namespace) -> list[report.Row]:
    """Return the times of one model for plain Inductor and for each budget."""
    methods = [INDUCTOR, *options.budgets]
    cold: dict[str, list[report.Row]] = {method: [] for method in methods}
    warm: dict[str, report.Row] = {}
    for _ in range(options.rounds):
        for method in methods:
            with tempfile.TemporaryDirectory() as caches:
                cold[method].append(_measure_in_process(name, method, caches))
                if method not in warm:
                    warm[method] = _measure_in_process(name, method, caches)
    plain_s = min(row["total_s"] for row in cold[INDUCTOR])
    rows: list[report.Row] = []
    for method in methods:
        best = min(cold[method], key=lambda row: row["total_s"])
        rows.append(
            {
                "method": method, **best, "extra_s": best["total_s"] - plain_s,
                "warm_s": warm[method]["total_s"], "warm_rounds": warm[method]["rounds"],
            }
        )  # fmt: skip
    return rows


def _measure_in_process(name: str, method: str, caches: str) -> report.Row:
    """Return the row of one first step, run in a new process with the cache folder `caches`."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--models", name, "--one", method]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "XDG_CACHE_HOME": caches}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{name}, {method}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def _first_step(name: str, method: str) -> report.Row:
    """Compile a model by its first step in this process, and return the seconds and the plans."""
    torch.manual_seed(0)
    workload = FAMILIES[name](torch.device("cpu"), False)
    small = torch.compile(lambda x: (x.sin() @ x).sum())
    small(torch.randn(8, 8, requires_grad=True)).backward()
    before = len(remat.compiled_plans())
    if method == INDUCTOR:
        module = torch.compile(copy_sharing_parameters(workload.model))
    else:
        options: dict[str, Any] = {"budget": method, "outputs": "dropped"}
        module = torch.compile(
            copy_sharing_parameters(workload.model), backend="remat", options=options
        )
    counter = _PlanningCounter()
    logging.getLogger("remat").addHandler(counter)
    logging.getLogger("remat").setLevel(logging.INFO)
    began = time.perf_counter()
    run_step(module, workload)  # type: ignore[arg-type]
    total_s = time.perf_counter() - began
    plans = [
        {"operations": p.operations, "kernels": len(p.plan.graph), "planned_s": p.planned_s}
        for p in remat.compiled_plans()[before:]
    ]
    return {"total_s": total_s, "rounds": counter.planning_count, "plans": plans}


class _PlanningCounter(logging.Handler):
    """Counts the graphs that are planned, without those whose plan comes from a cache."""

    planning_count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.planning_count += ": planning " in record.getMessage()


def _print_rows(title: str, rows: list[report.Row]) -> None:
    lines = [("", "first step", "more than Inductor", "planning", "operations", "warm")]
    for row in rows:
        plans = row["plans"]
        lines.append(
            (
                row["method"],
                f"{row['total_s']:.1f} s",
                f"{row['extra_s']:+.1f} s",
                f"{sum(p['planned_s'] for p in plans):.1f} s" if plans else "",
                str(sum(p["operations"] for p in plans)) if plans else "",
                f"{row['warm_s']:.1f} s, {row['warm_rounds']} planned",
            )
        )
    print(title, *Table(lines).lines(), "", sep="\n", flush=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--budgets", nargs="+", default=["50%", "min"])
    add("--rounds", type=int, default=2)
    add("--one", metavar="METHOD", help=argparse.SUPPRESS)
    add("--out", default=str(report.RESULTS), help="a folder for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
