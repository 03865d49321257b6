"""Runs one fault or healthy script in a process, and prints what `remat why` says as JSON.

python -m benchmarks.why_faults.child NAME DEVICE [--fixed] [--file FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from typing import Any

import torch

import remat
from benchmarks.why_faults.faults import FAULTS, Run
from benchmarks.why_faults.healthy import HEALTHY

CPU_STEPS, GPU_STEPS = 6, 40


def main() -> None:
    """Run the script; print {"error": ..., "findings": [...]}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--file")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.cuda.is_available = lambda: False
    script = HEALTHY.get(options.name) or FAULTS[options.name].script
    result: dict[str, Any] = {"error": None}
    steps = CPU_STEPS if options.device == "cpu" else GPU_STEPS
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(remat.watch(file=options.file))
        run = Run(watch, options.device, steps, options.fixed, options.file)
        try:
            script(run)
        except torch.OutOfMemoryError as error:
            result["error"] = str(error)
            explanation = watch.explain(error)
            if options.file:
                watch.save(options.file)
        else:
            assert run.explanation is not None
            explanation = run.explanation
    if options.device == "cuda":
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
    result["findings"] = [asdict(finding) for finding in explanation.findings]
    result["steps"] = explanation.steps
    print(json.dumps(result))


if __name__ == "__main__":
    main()
