"""Benchmark of the time that planning takes: from a model to its GraphModule, and of large graphs.

    python -m benchmarks.planning_time
    python -m benchmarks.planning_time --before ../remat-before --rounds 3

Each case runs in a process of its own, in seconds of the wall clock and of CPU time (of all
threads; on a shared machine these vary less). Imports, and building the model, are not counted.
`--before` names another checkout of remat: its code runs the same cases, interleaved.

* `ready_cold`, `ready_warm`: `remat.optimize` of GPT-2 with 12 layers on this CPU, to 60% of its
  memory, with an empty cache of costs and with the cache that the cold process filled;
* `trace96`: `remat.trace` of GPT-2 with 96 layers, on fake tensors;
* `solve_10000`: `remat.solve` at "min" of GPT-2 with 132 layers (10,717 operations);
* `fit_mamba`: `remat fit` of a Mamba of 32 layers and 512 tokens, in another process, with imports;
* `losses_whole`, `losses_pieces`: `remat.solve_step` for each of the losses of
  `tests.helpers.training.losses` at three budgets, with whole operations and with `split="auto"`;
  `language_whole`, `language_pieces`: the same for language models of the atlas. `cells` has the
  seconds of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tests.helpers.training.losses import LOSSES, Policy, batch_of
from torch._subclasses import FakeTensorMode

import remat
from benchmarks.atlas.tracing import TRACED_FOR, measured, trace_of
from benchmarks.harness import machine, report
from benchmarks.models.traced import TRACED_MODELS, default_cache, load_or_trace
from benchmarks.models.workloads import gpt2
from remat.report.report import Table

CASES = (
    "ready_cold", "ready_warm", "trace96", "solve_10000", "fit_mamba",
    "losses_whole", "losses_pieces", "language_whole", "language_pieces",
)  # fmt: skip
_SPLIT_BUDGETS = ("80%", "50%", "min")
_LANGUAGE_MODELS = ("gpt2", "llama-3-1b", "opt-6.7b", "mixtral", "t5-3b", "qwen3-14b")
_SOLVED_MODEL = "gpt_10000"
_FIT = ("fit", "hf:mamba", "--device", "h100", "--batch", "4", "--tokens", "512")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each case with each checkout, print a table, and write the result file."""
    options = _options(argv)
    if options.one:
        print(json.dumps(_measure_here(options.one, options)))
        return 0
    if "solve_10000" in options.cases:
        load_or_trace(_SOLVED_MODEL, options.traces)
    checkouts = {"after": Path(__file__).parents[1]}
    if options.before:
        checkouts = {"before": options.before.resolve(), **checkouts}
    rows: list[report.Row] = []
    for number in range(options.rounds):
        caches = {name: tempfile.TemporaryDirectory() for name in checkouts}
        for case in options.cases:
            for name, folder in checkouts.items():
                row = _measure_in_process(case, folder, caches[name].name, options)
                rows.append({"case": case, "code": name, "round": number, **row})
                print(json.dumps(rows[-1]), flush=True)
        for cache in caches.values():
            cache.cleanup()
    result: dict[str, Any] = {
        "benchmark": "planning-time",
        "units": "seconds of the wall clock and of CPU time, bytes; each row is one process",
        "machine": machine.describe(torch.device("cpu")),
        "code": {name: _commit(folder) for name, folder in checkouts.items()},
        "rows": rows,
    }
    _print_least(rows)
    if options.out:
        print(report.write_result(Path(options.out), "planning-time-cpu", result))
    return 0


def _measure_in_process(
    case: str, folder: Path, cache: str, options: argparse.Namespace
) -> report.Row:
    """Return the row of one case, measured in a new process with the code in `folder`."""
    paths = os.pathsep.join(str(folder / part) for part in ("solver", "server"))
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-m", "benchmarks.planning_time", "--one", case]
    command += ["--traces", str(options.traces), "--limit", str(options.limit)]
    command += ["--time-limit", str(options.time_limit)]
    run = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{case} with {folder}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def _measure_here(case: str, options: argparse.Namespace) -> report.Row:
    """Run a case in this process, and return its seconds and facts about its result."""
    prepared: dict[str, Callable[[], Callable[[], report.Row]]] = {
        "ready_cold": _ready,
        "ready_warm": _ready,
        "trace96": _trace,
        "solve_10000": lambda: _solve(options.traces, options.time_limit),
        "fit_mamba": lambda: lambda: _fit_mamba(options.limit),
        "losses_whole": lambda: _steps(_loss_traces(), "off"),
        "losses_pieces": lambda: _steps(_loss_traces(), "auto"),
        "language_whole": lambda: _steps(_language_traces(), "off"),
        "language_pieces": lambda: _steps(_language_traces(), "auto"),
    }
    run = prepared[case]()
    began_s, processor_began_s = time.perf_counter(), _processor_s()
    facts = run()
    return {
        "wall_s": round(time.perf_counter() - began_s, 2),
        "processor_s": round(_processor_s() - processor_began_s, 2),
        "load_1min": round(os.getloadavg()[0], 1),
        **facts,
    }


def _processor_s() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _ready() -> Callable[[], report.Row]:
    torch.manual_seed(0)
    workload = gpt2(torch.device("cpu"), False)

    def run() -> report.Row:
        module = remat.optimize(workload.model, "60%", example_kwargs=workload.batch)
        assert module.plan is not None
        return _plan_facts(module.plan)

    return run


def _trace() -> Callable[[], report.Row]:
    with FakeTensorMode():
        model, batch = TRACED_MODELS["gpt96"].make()
    return lambda: {"nodes": len(remat.trace(model.train(), (), batch).nodes)}


def _solve(traces: Path, time_limit_s: float) -> Callable[[], report.Row]:
    graph = remat.Trace.load(load_or_trace(_SOLVED_MODEL, traces)[0]).graph()
    strategy = remat.Auto(time_limit=time_limit_s)
    return lambda: {
        **_plan_facts(remat.solve(graph, "min", strategy)), "time_limit_s": time_limit_s,
    }  # fmt: skip


def _fit_mamba(limit_s: float) -> report.Row:
    command = [sys.executable, "-m", "remat", *_FIT]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"answer": f"none in {limit_s:g} s"}
    lines = (run.stdout or run.stderr).strip().splitlines()
    return {"exit_code": run.returncode, "answer": lines[-1][:120] if lines else ""}


def _loss_traces() -> dict[str, remat.Trace]:
    traces: dict[str, remat.Trace] = {}
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        trace = remat.trace(Policy(loss), (), batch_of(), outputs="loss")
        traces[name] = remat.measure(trace, remat.Roofline("h100"))
    return traces


def _language_traces() -> dict[str, remat.Trace]:
    return {name: measured(trace_of(name), TRACED_FOR) for name in _LANGUAGE_MODELS}


def _steps(traces: dict[str, remat.Trace], split: str) -> Callable[[], report.Row]:
    def run() -> report.Row:
        cells: dict[str, report.Row] = {}
        for name, budget in product(traces, _SPLIT_BUDGETS):
            began_s, facts = _processor_s(), dict[str, Any]()
            try:
                plan = remat.solve_step(traces[name], budget, split=split).plan
                facts = {"peak_bytes": plan.peak_bytes, "extra_time": round(plan.overhead, 5)}
            except remat.InfeasibleBudget:
                facts = {"peak_bytes": None}
            processor_s = round(_processor_s() - began_s, 2)
            cells[f"{name} {budget}"] = {"processor_s": processor_s, **facts}
        feasible = sum(cell["peak_bytes"] is not None for cell in cells.values())
        return {"cells": cells, "plans": feasible}

    return run


def _plan_facts(plan: remat.Plan) -> report.Row:
    bound = plan.lower_bound
    return {
        "peak_bytes": plan.peak_bytes,
        "extra_time": round(plan.overhead, 5),
        "lower_bound": None if bound is None else round(bound, 5),
        "status": plan.status.name.lower(),
    }


def _commit(folder: Path) -> str:
    """Return the commit of a checkout; "" outside of git."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _print_least(rows: Sequence[report.Row]) -> None:
    """Print the least seconds of each case and checkout."""
    least: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        key = (row["case"], row["code"])
        wall_s, processor_s = least.get(key, (float("inf"), float("inf")))
        least[key] = (min(wall_s, row["wall_s"]), min(processor_s, row["processor_s"]))
    header = ("case", "code", "wall s", "CPU s")
    cells = [(*key, *(f"{seconds:.1f}" for seconds in times)) for key, times in least.items()]
    print("\n".join(Table([header, *cells], "llr").lines()))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for `remat fit`")
    parser.add_argument(
        "--time-limit", type=float, default=60.0,
        help="seconds for the solver; more on a busy machine, or its clock ends the search early",
    )  # fmt: skip
    parser.add_argument("--traces", type=Path, default=default_cache(), help="folder of traces")
    parser.add_argument("--out", default=str(report.RESULTS), help="folder of the result file")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
