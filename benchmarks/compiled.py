"""Benchmark of torch.compile: remat's backend, torch's own budget, and per-block checkpointing.

    python -m benchmarks.compiled                       # all models, on CUDA if available
    python -m benchmarks.compiled --models gpt2 --quick --rounds 3
    python -m benchmarks.compiled --at-peaks            # remat with the bytes torch's budget takes

All methods share one set of parameters and run interleaved in one process. Peaks are allocated
bytes, with parameters, buffers, gradients and batch. Loss, gradients and buffers of three steps are
compared with those of plain torch.compile from the same seeds; eager mode samples other dropout
masks. On CPUs, freed memory stays with the process, as on CUDA.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config

import remat
from benchmarks.harness import report
from benchmarks.harness.measurement import (
    interleaved_step_times,
    keep_freed_memory,
    measure_usage,
    time_summary,
)
from benchmarks.harness.methods import (
    Method,
    copy_sharing_parameters,
    eager_method,
    per_block_method,
    run_step,
    try_method,
)
from benchmarks.harness.run_models import run_models
from benchmarks.models.families import FAMILIES
from benchmarks.models.workloads import Workload
from remat.frontend.compile.backend import remat_backend
from remat.limits.units import format_bytes
from remat.report.report import Table

INDUCTOR = "inductor"
AT_PEAK = "remat, at the peak of "
NamedBuilder = tuple[str, Callable[[], Method]]
_SEED = 3
_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark for each model, print its table, and write the result file."""
    options = _options(argv)

    def benchmark_model(name: str, workload: Workload, device: torch.device) -> dict[str, Any]:
        rows = run(workload, device, options)
        print_rows(f"{name}: {workload.size}", rows)
        return {"methods": rows}

    keep_freed_memory()
    units = "bytes, seconds; ratios are to plain torch.compile (inductor)"
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        name = "compiled-at-peaks" if options.at_peaks else "compiled"
        return run_models(name, options, {"units": units}, FAMILIES, benchmark_model)


def run(workload: Workload, device: torch.device, options: argparse.Namespace) -> list[report.Row]:
    """Return the measured row of each method."""
    rows: dict[str, report.Row] = {}
    methods: list[Method] = []
    expected: StepTensors = []
    buffers = {n: b.clone() for n, b in workload.model.named_buffers()}
    for name, make in _method_builders(workload, rows, options):
        method = try_method(name, make)
        rows[name] = {
            "method": name, "failure": method.failure, "setup_s": method.setup_s, **method.facts,
        }  # fmt: skip
        if method.failure:
            continue
        try:
            step_tensors = _run_steps(method, workload, buffers)
            rows[name]["peak_bytes"] = measure_usage(method, workload, device).peak_bytes
        except Exception as error:
            rows[name]["failure"] = f"{type(error).__name__}: {error}"[:500]
            continue
        if name == INDUCTOR:
            expected = step_tensors
        if expected and "backend" in method.facts:
            rows[name] |= _largest_errors(expected, step_tensors)
        if (limit := method.facts.get("budget_bytes")) is not None:
            rows[name]["within_budget"] = rows[name]["peak_bytes"] <= limit
        methods.append(method)
        print(f"  {name}: {sum(method.setup_s.values()):.0f} s to set up", flush=True)
        gc.collect()
    times = interleaved_step_times(methods, workload, device, options.rounds)
    for method in methods:
        row = rows[method.name]
        row |= time_summary(times, method.name)
        if INDUCTOR in times:
            row["time_to_inductor"] = _ratio(times, method.name, INDUCTOR)
            row["peak_to_inductor"] = row["peak_bytes"] / rows[INDUCTOR]["peak_bytes"]
        other = method.name.removeprefix(AT_PEAK)
        if other != method.name and other in times:
            row["time_to_torch"] = _ratio(times, method.name, other)
    return list(rows.values())


def _method_builders(
    workload: Workload, rows: Mapping[str, report.Row], options: argparse.Namespace
) -> Iterator[NamedBuilder]:
    """Yield the methods in order, as names with functions that build them.

    `rows` holds the rows of the methods that were measured already.
    """
    yield "eager", lambda: eager_method(workload)
    if not options.at_peaks:
        yield "per-block checkpoint", lambda: per_block_method(workload)
    yield INDUCTOR, lambda: _compiled(workload, INDUCTOR, copy_sharing_parameters(workload.model))
    if not options.at_peaks:
        yield "inductor, per-block checkpoint", lambda: _checkpointed(workload)
    for share in options.torch_budgets:
        name = f"torch budget {share:g}"
        yield name, _torch_budget(workload, name, share)
        if options.at_peaks and not rows[name]["failure"]:
            taken_bytes = rows[name]["peak_bytes"]
            yield AT_PEAK + name, _remat(workload, AT_PEAK + name, taken_bytes, options)
    if not options.at_peaks:
        for budget in options.budgets:
            yield f"remat {budget}", _remat(workload, f"remat {budget}", budget, options)
        if options.operations:
            name = f"remat {options.operations}, costs of operations"
            yield name, _remat_with_operation_costs(workload, name, options)


def _ratio(times: Mapping[str, list[float]], benchmark_model: str, other: str) -> float:
    """Return the median ratio of the step times of two methods in the same round."""
    return statistics.median(
        a / b for a, b in zip(times[benchmark_model], times[other], strict=True)
    )


def print_rows(title: str, rows: list[report.Row]) -> None:
    """Print the table of methods."""
    lines = [("", "peak", "/ inductor", "budget", "time / inductor", "gradients off by", "set-up")]
    for row in rows:
        if row["failure"]:
            lines.append((row["method"], "", "", "", "", "", _last_line(row["failure"])))
            continue
        error = row.get("gradient_error")
        lines.append(
            (
                row["method"],
                format_bytes(row["peak_bytes"]),
                f"{row.get('peak_to_inductor', 0):.3f}",
                {True: "kept", False: "EXCEEDED", None: ""}[row.get("within_budget")],
                f"{row.get('time_to_inductor', 0):.2f}",
                "" if error is None else f"{error:.0e}",
                f"{sum(row['setup_s'].values()):.0f} s",
            )
        )
    print(title, *Table(lines).lines(), "", sep="\n", flush=True)


def _last_line(failure: str) -> str:
    """Return the last line of an error message that is not advice of torch."""
    lines = [line for line in failure.splitlines() if line and "TORCH" not in line]
    return lines[-1][:60] if lines else failure[:60]


def _compiled(
    workload: Workload, name: str, model: torch.nn.Module, backend: Any = INDUCTOR, **options: Any
) -> Method:
    """Return the method of a model compiled with a backend, after its first step."""
    before = len(remat.compiled_plans())
    began = time.perf_counter()
    module = torch.compile(model, backend=backend, **options)
    run_step(module, workload)  # type: ignore[arg-type]
    setup_s = {"total": time.perf_counter() - began}
    plans = remat.compiled_plans()[before:]
    facts: dict[str, Any] = {"backend": str(backend)}
    requested_budget = options.get("options", {}).get("budget")
    if isinstance(requested_budget, int):  # the bytes of an earlier row reuse its compiled code
        facts["budget_bytes"] = requested_budget
    if plans:
        limits = [p.budget_bytes + p.external_bytes for p in plans if p.budget_bytes is not None]
        facts["budget_bytes"] = max(limits, default=None)
        facts["plans"] = [
            {
                "operations": len(p.plan.graph), "budget_bytes": p.budget_bytes,
                "baseline_bytes": p.baseline_bytes, "planned_bytes": p.plan.peak_bytes,
                "verified_bytes": p.verified_bytes, "overhead": p.plan.overhead,
                "planned_s": p.planned_s, "solve_s": p.plan.stats.get("total_s"),
                "rounds": p.rounds, "external_bytes": p.external_bytes,
            }
            for p in plans
        ]  # fmt: skip
    return Method(name, module, setup_s=setup_s, facts=facts)  # type: ignore[arg-type]


def _checkpointed(workload: Workload) -> Method:
    """Return the method of plain Inductor on a model with per-block checkpointing."""
    name = "inductor, per-block checkpoint"
    module = per_block_method(workload).module
    assert module is not None
    return _compiled(workload, name, module)


def _torch_budget(workload: Workload, name: str, share: float) -> Callable[[], Method]:
    """Return a function that compiles the model with torch's activation memory budget."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_fx(gm, inputs)

    # A new backend function, because dynamo would reuse the code compiled for another budget.
    return lambda: _compiled(workload, name, copy_sharing_parameters(workload.model), backend)


def _remat(
    workload: Workload, name: str, budget: int | str, options: argparse.Namespace
) -> Callable[[], Method]:
    """Return a function that compiles the model with remat's backend within a budget."""
    backend_options = {"budget": budget, "time_limit": options.time_limit, "outputs": "dropped"}
    return lambda: _compiled(
        workload, name, copy_sharing_parameters(workload.model), "remat", options=backend_options
    )


def _remat_with_operation_costs(
    workload: Workload, name: str, options: argparse.Namespace
) -> Callable[[], Method]:
    """Return a function that compiles a plan whose costs treat each operation as a kernel."""
    remat_options = {
        "budget": options.operations, "time_limit": options.time_limit, "outputs": "dropped",
    }  # fmt: skip

    # A new backend function, because dynamo would reuse the code compiled with the same options.
    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with mock.patch.object(remat.Partitioner, "_has_fused_costs", False):
            return remat_backend(gm, inputs, options=remat_options)

    return lambda: _compiled(workload, name, copy_sharing_parameters(workload.model), backend)


StepTensors = list[dict[str, dict[str, torch.Tensor]]]


def _run_steps(
    method: Method, workload: Workload, buffers: Mapping[str, torch.Tensor]
) -> StepTensors:
    """Return loss, gradients and buffers of some steps, each from a fixed seed.

    The first step starts with `buffers`, each later one with the buffers of the step before.
    """
    assert method.module is not None
    model = workload.model
    for name, buffer in model.named_buffers():  # setting up a method ran steps that changed them
        buffer.copy_(buffers[name])
    steps: StepTensors = []
    for step_index in range(_STEPS):
        torch.manual_seed(_SEED + step_index)
        loss = run_step(method.module, workload)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        step_buffers = {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}
        steps.append({"loss": {"": loss}, "gradient": grads, "buffer": step_buffers})
    model.zero_grad(set_to_none=True)
    return steps


def _largest_errors(expected: StepTensors, actual: StepTensors) -> dict[str, float]:
    """Return the largest relative difference of losses, gradients and buffers in any step.

    The scale is the tensor's largest element, but at least a hundredth of the largest element of
    its kind, because a small tensor may consist of rounding errors only.
    """
    errors = {"loss_error": 0.0, "gradient_error": 0.0, "buffer_error": 0.0}
    for expected_step, actual_step in zip(expected, actual, strict=True):
        for kind, tensors in expected_step.items():
            sizes = {name: t.abs().max().item() for name, t in tensors.items() if t.numel()}
            min_scale = 1e-2 * max(sizes.values(), default=0.0)
            for name, size in sizes.items():
                difference = (actual_step[kind][name] - tensors[name]).abs().max().item()
                error = difference / (max(size, min_scale) or 1.0)
                errors[f"{kind}_error"] = max(error, errors[f"{kind}_error"])
    return errors


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--budgets", nargs="+", default=["75%", "50%", "30%", "min"])
    add("--torch-budgets", nargs="*", type=float, default=[0.5, 0.3, 0.1, 0.0])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rounds", type=int, default=7)
    add("--threads", type=int, default=0)
    add("--time-limit", type=float, default=10.0)
    add("--at-peaks", action="store_true", help="only torch's budgets, and remat at their peaks")
    add("--operations", metavar="BUDGET", default="50%", help="also plan with per-operation costs")
    add("--quick", action="store_true", help="small models; writes a file only with --out")
    add("--out", help="a folder for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
