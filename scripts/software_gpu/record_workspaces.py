"""Record the workspaces of CUDA operators from torch's own allocations on the software GPU.

    python -m scripts.software_gpu.record_workspaces --python PYTHON --out FILE.json.gz

PYTHON has a CUDA build of torch, transformers and diffusers. Single calls (`workspaces`) are
recorded on each device that the software GPU can be, the operations of small models on an H100. The
tests of `remat.costs.workspaces` compare formulas with the recording. No convolutions: cuDNN, whose
workspaces they have on a GPU, does not run on the software GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.software_gpu.environment import DEVICES

FAMILY_DEVICE = "h100"
CALLS = (
    "attention", "images", "indexing", "losses", "matmuls", "norms", "pointwise", "reductions",
    "sorting",
)  # fmt: skip
"""Modules of `workspaces` that have calls."""
_EXCLUDED = ("convolution",)

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Record on each device in a process of its own, and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", help=argparse.SUPPRESS)  # in the process of one device
    options = parser.parse_args(argv)
    if options.device:
        rows = list(_record(options.device))
        options.out.write_text(json.dumps({"torch": _torch_version(), "rows": rows}))
        sys.stdout.flush()
        os._exit(0)  # not by the exit handlers of CUDA libraries
    merged: dict[str, Row] = {}
    version = ""
    for device in DEVICES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            _run_on(device, options.python, file)
            recording = json.loads(file.read_text())
        version = recording["torch"]
        for row in recording["rows"]:
            size = row.pop("workspace_bytes")
            key = json.dumps(row, sort_keys=True)
            merged.setdefault(key, row | {"workspace_bytes": {}})["workspace_bytes"][device] = size
    content = {
        "torch": version,
        "made_by": "python -m scripts.software_gpu.record_workspaces",
        "cases": sorted(merged.values(), key=lambda row: json.dumps(row, sort_keys=True)),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    options.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{options.out}: {len(merged):,} calls of torch {version}")
    return 0


def _run_on(device: str, python: str, file: Path) -> None:
    module = "scripts.software_gpu"
    command = [sys.executable, "-m", module, "--python", python, "--device", device, "--expandable"]
    command += ["--", "-m", f"{module}.record_workspaces", "--device", device, "--out", str(file)]
    subprocess.run(command, check=True)


def _torch_version() -> str:
    import torch

    return torch.__version__


def _record(device: str) -> Iterator[Row]:
    """Yield each call with its workspace. Runs on the software GPU."""
    import torch

    torch.backends.cudnn.enabled = False  # the software GPU does not replace cuDNN
    torch.backends.cuda.enable_cudnn_sdp(False)
    recorded: set[str] = set()
    for row in (*_single_rows(), *(_model_rows() if device == FAMILY_DEVICE else ())):
        key = json.dumps([row["target"], row["args"], row["kwargs"]])
        if key not in recorded:
            recorded.add(key)
            yield row


def _single_rows() -> Iterator[Row]:
    """Yield the calls of `workspaces`."""
    from scripts.software_gpu.workspaces.calls import call_of, encoded_call, results_of

    modules = (import_module(f"scripts.software_gpu.workspaces.{name}") for name in CALLS)
    for case in (case for module in modules for case in module.cases()):
        try:
            call = call_of(case)
            size = _workspace_bytes(call)
        except (NotImplementedError, RuntimeError) as error:
            print(f"not recorded: {case.target}: {str(error).splitlines()[0][:100]}")
            continue
        yield {**encoded_call(case), "results": results_of(call()), "workspace_bytes": size}


def _model_rows() -> Iterator[Row]:
    """Yield the operations of small models, each traced on the device."""
    import contextlib

    import torch
    from benchmarks.software_gpu.families import DTYPES, FAMILIES, build

    import remat

    for family in FAMILIES:
        for dtype in DTYPES:
            model, batch = build(family, dtype)
            is_autocast = dtype == "autocast"
            context = torch.autocast("cuda", torch.bfloat16) if is_autocast else None
            with context or contextlib.nullcontext():
                try:
                    trace = remat.trace(model, (), batch)
                except remat.RematError as error:
                    print(f"not recorded: {family} {dtype}: {str(error)[:100]}")
                    continue
            yield from _trace_rows(trace)


def _trace_rows(trace: Any) -> Iterator[Row]:
    import torch
    from scripts.software_gpu.workspaces.calls import case_of_node, encoded_call, results_of_node

    from remat.errors import RematError
    from remat.frontend.common.torch_modes import isolated_modes
    from remat.frontend.costs.cost_key import cost_key
    from remat.frontend.costs.operation_benchmark import OperationBenchmark

    metas = trace.tensors
    device = torch.device("cuda", 0)
    distinct = {repr(cost_key(node, metas, "cuda")): node for node in trace.nodes if not node.view}
    with isolated_modes(device):
        benchmark = OperationBenchmark(trace.nodes, metas, "cuda", device)
        for node in distinct.values():
            if node.target.startswith("remat.") or any(w in node.target for w in _EXCLUDED):
                continue
            try:
                size = _workspace_bytes(benchmark.prepare(node))
            except (RematError, RuntimeError) as error:
                print(f"not recorded: {node.target}: {str(error).splitlines()[0][:100]}")
                continue
            row = {**encoded_call(case_of_node(node, metas)), "results": results_of_node(node)}
            yield row | {"workspace_bytes": size}


def _workspace_bytes(call: Callable[[], object]) -> int:
    import torch

    from remat.frontend.costs.timers import measure_memory_on_cuda

    return measure_memory_on_cuda(call, torch.device("cuda", 0))[0]


if __name__ == "__main__":
    raise SystemExit(main())
