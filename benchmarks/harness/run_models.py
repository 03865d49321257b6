"""Run a benchmark over models, and write its result file after each of them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks.harness import machine, report
from benchmarks.models.workloads import Workload

WorkloadBuilder = Callable[[torch.device, bool], Workload]
"""Builds a workload on a device; the second argument asks for a small one."""

ModelBenchmark = Callable[[str, Workload, torch.device], dict[str, Any]]
"""Runs a named model's workload, prints its table and returns its part of the result file."""


def run_models(
    benchmark: str,
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    models: Mapping[str, WorkloadBuilder],
    run: ModelBenchmark,
) -> int:
    """Run the benchmark for each of `options.models` and write the results.

    Return 0 even if an aim is missed: that is a result, not an error.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 256  # each method compiles the same code objects
    torch._dynamo.config.accumulated_recompile_limit = 1024
    device = torch.device(options.device)
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "quick": options.quick,
        **facts,
        "machine": machine.describe(device),
        "models": {},
    }
    out = options.out or (None if options.quick else report.RESULTS)
    for name in options.models:
        torch.manual_seed(0)
        workload = models[name](device, options.quick)
        result["models"][name] = {"size": workload.size, **run(name, workload, device)}
        if out:  # after each model, so that an interrupted run leaves its results
            print(
                "written:",
                report.write_result(Path(out), f"{benchmark}-{machine.slug(device)}", result),
            )
    return 0
