"""Goldens: what plans are today, so that a change of the library's structure shows what it changes.

    python -m benchmarks.goldens record before.json
    python -m benchmarks.goldens compare before.json     # records again, and prints what differs
    python -m benchmarks.goldens compare before.json --with after.json

Three parts, each through the public functions only:

* `steps`: steps traced for an absent H100, with roofline costs, at three budgets: recomputation
  only, with operations in pieces, and with tensors offloaded. Peak, time, proved bound, a digest of
  the schedule, and what is split and offloaded.
* `compiled`: models under torch.compile(backend="remat") on this machine, at two budgets: the
  verified peak, and the largest difference of a gradient from the same graph without a plan.
* `blocks`: models planned by blocks, at two budgets: predicted and measured peak, and the
  difference of gradients from eager mode.

A cell is worse if its time at the same budget rises by more than 0.1 points of the step's time
without recomputation, if its peak rises, or if it has no plan any more. Costs of `compiled` and
`blocks` are measured, so their times are not compared. The exit code is 1 if a cell is worse.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.atlas.tracing import TRACED_FOR, measured, trace_of
from benchmarks.harness.measurement import measure_usage
from benchmarks.harness.methods import Method, copy_sharing_parameters, run_step
from benchmarks.models.families import FAMILIES
from benchmarks.models.workloads import Workload
from remat.report.report import Table

Cell = dict[str, Any]
Cells = dict[str, Cell]

GAP = 0.005
TIME_TOLERANCE = 0.001
"""A share of the step's time without recomputation."""

STEP_BUDGETS = ("70%", "40%", "min")
STEP_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"split": "auto"},
    "offload": {"split": "auto", "offload": "auto"},
}
ATLAS_STEPS = (
    "gpt2", "llama-3-70b", "opt-6.7b", "mixtral", "t5-3b", "bert-large", "convnext-b", "swin-b",
    "unet-segmentation", "gru",
)  # fmt: skip
"""Steps of the atlas with few operations; the whole atlas takes hours."""

MODEL_BUDGETS = ("75%", "min")


def main(argv: Sequence[str] | None = None) -> int:
    """Record cells, or compare two records. Return 1 if a cell is worse."""
    options = _options(argv)
    torch.set_num_threads(1)
    logging.getLogger("remat").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.command == "record":
        record(options.file, options.parts, options.only)
        return 0
    before = _load(options.file)
    after_file = options.after or options.file.with_name(f"after-{options.file.name}")
    if options.after is None:
        record(after_file, options.parts, options.only)
    return print_differences(before, _load(after_file))


def record(file: Path, parts: Sequence[str], only: str) -> None:
    """Write the cells whose names contain `only` to a file; each as soon as it is done. Cells that
    the file has are not recomputed."""
    cells = _load(file) if file.exists() else {}
    for part in parts:
        for name, compute in PARTS[part]():
            key = f"{part}/{name}"
            if only not in key or key in cells:
                continue
            began_s = time.perf_counter()
            try:
                cells[key] = compute()
            except Exception as error:  # torch.compile wraps the errors of a backend
                cells[key] = {"error": type(error).__name__, "text": str(error)[:300]}
            cells[key]["seconds"] = round(time.perf_counter() - began_s, 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(cells, indent=1))
            print(f"{key}: {_summary(cells[key])}", flush=True)


def print_differences(before: Cells, after: Cells) -> int:
    """Print a table of the cells that differ. Return 1 if a cell is worse."""
    rows = [("cell", "field", "before", "after", "")]
    num_worse = 0
    for key in before:
        if key not in after:
            rows.append((key, "", "", "not recorded", ""))
            continue
        for field, old, new in _differences(before[key], after[key]):
            is_worse = _is_worse(field, old, new)
            num_worse += is_worse
            rows.append((key, field, str(old), str(new), "WORSE" if is_worse else ""))
    print(*Table(rows, "llr").lines(), sep="\n")
    common = before.keys() & after.keys()
    same = sum(not [*_differences(before[key], after[key])] for key in common)
    print(f"\n{same} of {len(common)} cells are the same; {num_worse} figures are worse")
    return 1 if num_worse else 0


_COMPARED = ("error", "peak_bytes", "measured_bytes", "overhead", "bound", "schedule", "pieces",
             "offloaded", "gradient_error")  # fmt: skip


def _differences(old: Cell, new: Cell) -> Iterator[tuple[str, Any, Any]]:
    for field in _COMPARED:
        if old.get(field) != new.get(field):
            yield field, old.get(field), new.get(field)


def _is_worse(field: str, old: Any, new: Any) -> bool:
    if field == "error":
        return new is not None
    if new is None or old is None:
        return False
    if field in ("peak_bytes", "measured_bytes"):
        return bool(new > old)
    if field == "overhead":
        return bool(new > old + TIME_TOLERANCE)
    return field == "gradient_error" and bool(new > max(old, 1e-5))


def _summary(cell: Cell) -> str:
    fields = ("error", "peak_bytes", "measured_bytes", "overhead", "gradient_error", "seconds")
    return ", ".join(f"{field} {cell[field]}" for field in fields if field in cell)


# -- steps ----------------------------------------------------------------------------------------


def _steps() -> Iterator[tuple[str, Callable[[], Cell]]]:
    for name in ATLAS_STEPS:
        trace: list[remat.Trace] = []

        def load(name: str = name, trace: list[remat.Trace] = trace) -> remat.Trace:
            if not trace:
                trace.append(measured(trace_of(name), TRACED_FOR))
            return trace[0]

        for budget in STEP_BUDGETS:
            for kind, options in STEP_KINDS.items():
                yield f"{name} {budget} {kind}", _step_cell(load, budget, options)


def _step_cell(
    load: Callable[[], remat.Trace], budget: str, options: dict[str, Any]
) -> Callable[[], Cell]:
    def compute() -> Cell:
        strategy = remat.Auto(gap=GAP, time_limit=15.0, threads=1)
        step = remat.solve_step(load(), budget, strategy, **options)
        plan = step.plan
        runs = " ".join(plan.graph.operations[op].name for op in plan.schedule.runs)
        return {
            "peak_bytes": plan.peak_bytes,
            "overhead": round(plan.overhead, 6),
            "bound": None if plan.lower_bound is None else round(plan.lower_bound, 6),
            "schedule": hashlib.sha256(runs.encode()).hexdigest()[:12],
            "runs": len(plan.schedule),
            "pieces": max((s.pieces for s in plan.graph.splits), default=0),
            "offloaded": int(plan.stats.get("host_bytes", 0)),
        }

    return compute


# -- compiled models ------------------------------------------------------------------------------


def _compiled() -> Iterator[tuple[str, Callable[[], Cell]]]:
    device = torch.device("cpu")
    for name, build in FAMILIES.items():
        for budget in MODEL_BUDGETS:
            for inductor in (True, False):
                title = f"{name} {budget} {'Inductor' if inductor else 'no Inductor'}"
                yield (
                    title,
                    _compiled_cell(lambda build=build: build(device, True), budget, inductor),
                )


def _compiled_cell(
    build: Callable[[], Workload], budget: str, inductor: bool
) -> Callable[[], Cell]:
    def compute() -> Cell:
        torch.manual_seed(0)
        workload = build()
        without = "inductor" if inductor else "aot_eager_decomp_partition"
        with _fresh_compiler():
            plain: Any = torch.compile(_copy(workload), backend=without)
            wanted = _gradients(workload, plain)
        before = len(remat.compiled_plans())
        options = {"budget": budget, "inductor": inductor, "time_limit": 10.0}
        with _fresh_compiler():
            module = torch.compile(_copy(workload), backend="remat", options=options)
            actual = _gradients(workload, module)
        plans = remat.compiled_plans()[before:]
        return {
            "peak_bytes": max((p.verified_bytes or p.plan.peak_bytes for p in plans), default=None),
            "gradient_error": _largest_error(wanted, actual),
            "graphs": len(plans),
        }

    return compute


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fallback_random=True),
    ):
        yield


# -- blocks ---------------------------------------------------------------------------------------


def _blocks() -> Iterator[tuple[str, Callable[[], Cell]]]:
    device = torch.device("cpu")
    for name in ("gpt2", "llama", "qwen3_moe", "bert", "t5", "vit"):
        build = FAMILIES[name]
        for budget in MODEL_BUDGETS:
            yield f"{name} {budget}", _blocks_cell(lambda build=build: build(device, True), budget)


def _blocks_cell(build: Callable[[], Workload], budget: str) -> Callable[[], Cell]:
    def compute() -> Cell:
        torch.manual_seed(0)
        workload = build()
        wanted = _gradients(workload, workload.model)
        model = _copy(workload)
        remat.enable(model, budget, scope="blocks")
        actual = _gradients(workload, model)
        plan = remat.plans(model)[-1]
        method = Method("blocks", model)  # type: ignore[arg-type]
        return {
            "peak_bytes": plan.peak_bytes,
            "measured_bytes": measure_usage(method, workload, torch.device("cpu")).peak_bytes,
            "gradient_error": _largest_error(wanted, actual),
        }

    return compute


# -- shared ---------------------------------------------------------------------------------------


def _copy(workload: Workload) -> nn.Module:
    return copy_sharing_parameters(workload.model)


def _gradients(workload: Workload, module: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the second step, which follows the plan."""
    for seed in (0, 1):
        workload.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        run_step(module, workload)
    parameters = workload.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    return gradients


def _largest_error(wanted: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a share of the gradient's largest element."""
    if wanted.keys() != actual.keys():
        return float("inf")
    smallest = 1e-2 * max(g.abs().max().item() for g in wanted.values())
    errors = (
        (actual[name] - g).abs().max().item() / max(g.abs().max().item(), smallest)
        for name, g in wanted.items()
    )
    return float(f"{max(errors):.1e}")


PARTS: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Cell]]]]] = {
    "steps": _steps,
    "compiled": _compiled,
    "blocks": _blocks,
}


def _load(file: Path) -> Cells:
    return json.loads(file.read_text())


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        command.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
        command.add_argument("--only", default="", help="cells whose names contain this text")
        if name == "compare":
            command.add_argument("--with", dest="after", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
