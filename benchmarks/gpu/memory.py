"""Steps 2, 3, 4 and 10: predicted bytes against requested, allocated and reserved bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import remat
from benchmarks.gpu.device import (
    StepPeaks,
    allocated_bytes,
    free_unused_memory,
    is_cuda,
    measure_peaks,
    memory_limit,
)
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.measurement import resident_tensors
from benchmarks.harness.methods import run_step
from benchmarks.models.workloads import Workload
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.memory.device_memory import keeps_cublas_workspaces, library_bytes
from remat.limits.units import format_bytes

TOLERANCE_BYTES = 2 << 20


def check_library_workspaces(setting: Setting, report: Report) -> None:
    """Step 2: check the workspaces that matmuls leave allocated.

    Measured on the forward's thread and on the backward's, which have a workspace each; and for
    linear layers, which may run in another library.
    """
    device = setting.device
    expected_bytes = library_bytes(device, ["aten.mm.default"]) if keeps_cublas_workspaces() else 0
    bytes_left = {kind: _bytes_left(kind, device) for kind in ("matmul", "linear")}
    subject = "bytes left by a matmul in forward, and in backward"
    requirement = f"{format_bytes(expected_bytes)} in total, within 2 MiB"
    if not is_cuda(device):
        report.skip(subject, requirement, "a CPU's allocator has no such counter")
        return
    forward_bytes, total_bytes = bytes_left["matmul"]
    observed = f"{format_bytes(forward_bytes)}, then {format_bytes(total_bytes)}"
    is_met = abs(total_bytes - expected_bytes) <= TOLERANCE_BYTES
    report.judge(subject, requirement, observed, is_met, bytes_left=bytes_left)
    report.info("linear layers add", format_bytes(bytes_left["linear"][1]))


def _bytes_left(kind: str, device: torch.device) -> tuple[int, int]:
    """Return the bytes that stay allocated after a product, and after its backward too."""
    # Up to 1 MiB, the allocator's blocks are as large as the request.
    x, w = (torch.randn(256, 256, device=device, requires_grad=True) for _ in range(2))
    bias = torch.randn(256, device=device)
    before = allocated_bytes(device)
    y = x @ w if kind == "matmul" else F.linear(x, w, bias)
    forward_bytes = allocated_bytes(device) - before - _rounded(y)
    gradient = torch.ones_like(y)
    y.backward(gradient)
    assert x.grad is not None
    assert w.grad is not None
    tensor_bytes = sum(map(_rounded, (y, gradient, x.grad, w.grad)))
    return forward_bytes, allocated_bytes(device) - before - tensor_bytes


def _rounded(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes, rounded up to the allocator's alignment."""
    return -(-tensor.untyped_storage().nbytes() // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def optimize_workload(
    workload: Workload,
    budget: int | str,
    setting: Setting,
    *,
    solve_s: float = 10.0,
    cache: str = "",
    cuda_graphs: bool = False,
    outputs: str = "dropped",
    **options: Any,
) -> remat.RematModule:
    """Return `remat.optimize` of the workload's model, with costs measured on this device.

    The step of a workload references only the loss in the backward: its outputs are dropped. Costs
    of unsplit operations are measured first, so that with split="off" other parts can use the GPU
    during the solve.
    """
    workload.model.zero_grad(set_to_none=True)  # existing gradients would plan for accumulation
    cache = cache or setting.costs
    is_measured_first = setting.is_timed and options.get("split") == "off"
    with workload.autocast_context():
        if is_measured_first:
            trace = remat.trace(workload.model, (), workload.batch, outputs=outputs)
            with setting.gpu():
                remat.measure(trace, cache=cache)
        with contextlib.nullcontext() if is_measured_first else setting.gpu():
            return remat.optimize(
                workload.model,
                budget,
                (),
                workload.batch,
                strategy=remat.Auto(gap=0.02, time_limit=setting.solve_limit_s(solve_s)),
                cache=cache,
                cuda_graphs=cuda_graphs,
                outputs=outputs,
                **options,
            )


def plan_figures(gm: remat.RematModule) -> dict[str, object]:
    """Return the figures that a module's plan predicts: budget, peak, overhead, status, bytes."""
    plan = gm.plan
    assert plan is not None
    assert gm.program is not None
    return {
        "budget_bytes": plan.stats.get("requested_budget_bytes", plan.budget_bytes),
        "predicted_peak_bytes": gm.program.predicted_peak_bytes,
        "predicted_overhead": plan.overhead,
        "status": plan.status.name,
        "stats": {key: value for key, value in plan.stats.items() if key.endswith("_bytes")},
    }


def check_predicted_bytes(build_workload: WorkloadBuilder, is_expandable: bool) -> PartFunction:
    """Step 3 for one model: check predicted bytes against requested and allocated bytes."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        for budget in ("100%", "60%", "min"):
            try:
                gm = optimize_workload(workload, budget, setting)
            except remat.InfeasibleBudget as error:
                report.judge(f"{budget}: a plan", "there is one", str(error), False)
                continue
            predicted = plan_figures(gm)
            run_step(gm, workload)  # libraries take their workspaces
            measured = _peaks(gm, workload, device)
            predicted_bytes = _int(predicted["predicted_peak_bytes"])
            share = measured.requested_bytes / predicted_bytes
            report.judge(
                f"{budget}: requested",
                f"0.98 to 1 of the predicted {format_bytes(predicted_bytes)}",
                f"{share:.4f}",
                0.98 <= share <= 1,
                **predicted,
                **vars(measured),
            )
            _judge_allocated(report, f"{budget}: allocated", predicted, measured, is_expandable)
            del gm

    return run


def _peaks(gm: remat.RematModule, workload: Workload, device: torch.device) -> StepPeaks:
    """Return the peaks of one step that starts without gradients and cached blocks."""
    workload.model.zero_grad(set_to_none=True)
    free_unused_memory(device)
    return measure_peaks(lambda: run_step(gm, workload), device, resident_tensors(workload))


def _judge_allocated(
    report: Report,
    subject: str,
    predicted: dict[str, object],
    measured: StepPeaks,
    is_expandable: bool,
) -> None:
    """Report the allocated bytes: a requirement with expandable segments, a figure without."""
    limit_bytes = _int(predicted["budget_bytes"])
    requirement = f"at most the budget of {format_bytes(limit_bytes)}"
    if measured.allocated_bytes is None or measured.reserved_bytes is None:
        report.skip(subject, requirement, "a CPU's allocator has no such counter")
        return
    observed = (
        f"{format_bytes(measured.allocated_bytes)} ({measured.allocated_bytes / limit_bytes:.4f}), "
        f"reserved {format_bytes(measured.reserved_bytes)}, {measured.retries} retries"
    )
    prefix = "expandable_" if is_expandable else ""
    predicted_stats = predicted["stats"]
    assert isinstance(predicted_stats, dict)
    for kind in ("allocated", "reserved"):
        if (size := predicted_stats.get(f"{prefix}{kind}_peak_bytes")) is not None:
            observed += f"; {format_bytes(int(size))} {kind} predicted"
    if is_expandable:
        report.judge(subject, requirement, observed, measured.allocated_bytes <= limit_bytes)
    else:
        report.info(subject, observed)


def check_hard_limit(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 4 for one model: three steps at 60% on a device limited to 1.05 times that budget."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        gm = optimize_workload(workload, "60%", setting)
        limit_bytes = int(1.05 * _int(plan_figures(gm)["budget_bytes"]))
        free_unused_memory(device)
        subject, requirement = "60%, on a device of 1.05 times that", "no out-of-memory error"
        with memory_limit(device, limit_bytes):
            try:
                for _ in range(2):
                    run_step(gm, workload)
                measured = _peaks(gm, workload, device)
            except torch.OutOfMemoryError as error:
                report.judge(subject, requirement, str(error)[:300], False, **plan_figures(gm))
                return
        retries = _retries(device)
        observed = f"three steps, {retries} retries"
        report.judge(subject, requirement, observed, True, **plan_figures(gm), **vars(measured))

    return run


def _retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if is_cuda(device) else 0


def fill_cost_cache(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 10, first half: fill a cost cache in one process."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        cache = _cache(setting)
        cache.unlink(missing_ok=True)
        gm = optimize_workload(build_workload(setting), "60%", setting, cache=str(cache))
        report.judge("a cost cache", "written", str(cache.name), cache.exists(), **plan_figures(gm))

    return run


def check_warm_process(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 10, second half: check the first step of a process with a full cost cache."""

    def run(setting: Setting, report: Report) -> None:
        subject, requirement = "the first step with a warm cost cache", "within the budget"
        cache = _cache(setting)
        if not cache.exists():
            report.skip(subject, requirement, "no cost cache: its first part did not finish")
            return
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        workload, device = build_workload(setting), setting.device
        gm = optimize_workload(workload, "60%", setting, cache=str(cache))
        measured = _peaks(gm, workload, device)  # the process's first step
        predicted = plan_figures(gm)
        limit_bytes = _int(predicted["budget_bytes"])
        peak_bytes = measured.allocated_bytes
        if peak_bytes is None:
            peak_bytes = measured.requested_bytes
        observed = f"{format_bytes(peak_bytes)} ({peak_bytes / limit_bytes:.4f} of it)"
        is_met = peak_bytes <= limit_bytes
        report.judge(subject, requirement, observed, is_met, **predicted, **vars(measured))

    return run


def _cache(setting: Setting) -> Path:
    """Return the path of step 10's own cost cache."""
    return setting.folder / "warm.sqlite"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
