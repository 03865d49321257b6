"""Runs one fault or healthy script in a process, and prints what `remat why` says as JSON.

    python -m benchmarks.why_faults.child NAME DEVICE [--fixed] [--file FILE]
"""

from __future__ import annotations

import argparse
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
    watch = None
    try:
        with remat.watch(file=options.file) as watch:
            script(Run(watch, options.device, steps, options.fixed))
            if options.file:
                watch.save(options.file)
            explanation = watch.explain()
    except torch.OutOfMemoryError as error:
        assert watch is not None
        result["error"] = str(error)
        explanation = watch.explanation
        assert explanation is not None
    result["findings"] = [asdict(finding) for finding in explanation.findings]
    result["steps"] = explanation.steps
    print(json.dumps(result))


if __name__ == "__main__":
    main()
