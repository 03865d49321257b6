"""Runs a benchmark over models: what is the same for all that compare ways to run a step."""

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

RESULTS = Path(__file__).parent / "results"

Make = Callable[[torch.device, bool], Workload]
Run = Callable[[str, Workload, torch.device], dict[str, Any]]
"""The result of one model, once it is shown; by its name."""


def run_models(
    benchmark: str,
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    models: Mapping[str, Make],
    run: Run,
) -> int:
    """Run each of `options.models`, and write the results. Returns 0: an aim that is missed is a
    result, not an error."""
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 256  # every method compiles the same code anew
    torch._dynamo.config.accumulated_recompile_limit = 1024
    device = torch.device(options.device)
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "quick": options.quick,
        **facts,
        "machine": machine.describe(device),
        "models": {},
    }
    out = options.out or (None if options.quick else RESULTS)
    for name in options.models:
        torch.manual_seed(0)
        workload = models[name](device, options.quick)
        result["models"][name] = {"size": workload.size, **run(name, workload, device)}
        if out:  # after each: what is interrupted has what was done
            print(
                "written:",
                report.write_result(Path(out), f"{benchmark}-{machine.slug(device)}", result),
            )
    return 0
