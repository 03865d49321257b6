"""Steps 2, 3, 4 and 10: bytes that are predicted, requested, allocated and reserved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.measurement import resident_tensors
from benchmarks.harness.methods import run_step
from benchmarks.models.workloads import Workload
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.memory.device_memory import keeps_workspaces, library_bytes
from remat.limits.units import format_bytes

TOLERANCE_BYTES = 2 << 20

WorkloadBuilder = Callable[[Setting], Workload]


def check_library_workspaces(setting: Setting, report: Report) -> None:
    """Step 2: what matrix products leave allocated, on the thread of the forward and on that of the
    backward; and what linear layers add, which may run in another library."""
    device = setting.device
    expected_bytes = library_bytes(device, ["aten.mm.default"]) if keeps_workspaces() else 0
    bytes_left: dict[str, tuple[int, int]] = {}
    for kind in ("product", "linear"):
        # Up to a mebibyte, blocks are as large as was asked for.
        x, w = (torch.randn(256, 256, device=device, requires_grad=True) for _ in range(2))
        bias = torch.randn(256, device=device)
        before = allocated_bytes(device)
        y = x @ w if kind == "product" else F.linear(x, w, bias)
        forward_bytes = allocated_bytes(device) - before - _rounded(y)
        gradient = torch.ones_like(y)
        y.backward(gradient)
        assert x.grad is not None
        assert w.grad is not None
        tensor_bytes = sum(map(_rounded, (y, gradient, x.grad, w.grad)))
        bytes_left[kind] = forward_bytes, allocated_bytes(device) - before - tensor_bytes
    subject = "left by a product in forward, and in backward"
    requirement = f"{format_bytes(expected_bytes)} in all, within 2 MiB"
    if not is_cuda(device):
        report.skip(subject, requirement, "a CPU's allocator keeps no count")
        return
    forward_bytes, all_bytes = bytes_left["product"]
    measured = f"{format_bytes(forward_bytes)}, then {format_bytes(all_bytes)}"
    report.judge(subject, requirement, measured, abs(all_bytes - expected_bytes) <= TOLERANCE_BYTES, bytes_left=bytes_left)
    report.info("linear layers add", format_bytes(bytes_left["linear"][1]))


def _rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def optimize_workload(
    workload: Workload,
    budget: int | str,
    setting: Setting,
    *,
    solve_s: float = 10.0,
    cache: str = "",
    cuda_graphs: bool = False,
) -> remat.RematModule:
    """The model within a budget, by costs that are measured here."""
    workload.model.zero_grad(set_to_none=True)  # with gradients there, accumulation is planned
    with workload.autocast_context():
        return remat.optimize(
            workload.model,
            budget,
            (),
            workload.batch,
            strategy=remat.Auto(gap=0.02, time_limit=setting.solve_s(solve_s)),
            cache=cache or setting.costs,
            cuda_graphs=cuda_graphs,
        )


def plan_figures(gm: remat.RematModule) -> dict[str, object]:
    """What a plan predicts."""
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


def check_predicted_bytes(build_workload: WorkloadBuilder, is_expandable: bool) -> Callable[[Setting, Report], None]:
    """Step 3 for one model: what is predicted against what is requested, allocated, reserved."""

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
    workload.model.zero_grad(set_to_none=True)
    free_unused_memory(device)
    return measure_peaks(lambda: run_step(gm, workload), device, resident_tensors(workload))


def _judge_allocated(
    report: Report, subject: str, predicted: dict[str, object], measured: StepPeaks, is_expandable: bool
) -> None:
    limit_bytes = _int(predicted["budget_bytes"])
    requirement = f"at most the budget of {format_bytes(limit_bytes)}"
    if measured.allocated_bytes is None or measured.reserved_bytes is None:
        report.skip(subject, requirement, "a CPU's allocator keeps no count")
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
            observed += f"; {format_bytes(int(size))} {kind} foreseen"
    if is_expandable:
        report.judge(subject, requirement, observed, measured.allocated_bytes <= limit_bytes)
    else:
        report.info(subject, observed)


def check_hard_limit(build_workload: WorkloadBuilder) -> Callable[[Setting, Report], None]:
    """Step 4 for one model: three steps at 60% where the device has no more than 1.05 of that."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        gm = optimize_workload(workload, "60%", setting)
        limit_bytes = int(1.05 * _int(plan_figures(gm)["budget_bytes"]))
        free_unused_memory(device)
        subject, requirement = "60%, where the device has 1.05 of that", "no out-of-memory error"
        with memory_limit(device, limit_bytes):
            try:
                for _ in range(2):
                    run_step(gm, workload)
                measured = _peaks(gm, workload, device)
            except torch.OutOfMemoryError as error:
                report.judge(subject, requirement, str(error)[:300], False, **plan_figures(gm))
                return
        retries = _retries(device)
        report.judge(
            subject, requirement, f"three steps, {retries} retries", True, **plan_figures(gm), **vars(measured)
        )

    return run


def _retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if is_cuda(device) else 0


def fill_cost_cache(build_workload: WorkloadBuilder) -> Callable[[Setting, Report], None]:
    """Step 10, first half: a process that fills a cost cache."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        cache = _cache(setting)
        cache.unlink(missing_ok=True)
        gm = optimize_workload(build_workload(setting), "60%", setting, cache=str(cache))
        report.judge("a cost cache", "written", str(cache.name), cache.exists(), **plan_figures(gm))

    return run


def check_warm_process(build_workload: WorkloadBuilder) -> Callable[[Setting, Report], None]:
    """Step 10, second half: the first step of a process that measures nothing."""

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
        measured = _peaks(gm, workload, device)  # no step before it
        predicted = plan_figures(gm)
        limit_bytes = _int(predicted["budget_bytes"])
        size = measured.requested_bytes if measured.allocated_bytes is None else measured.allocated_bytes
        observed = f"{format_bytes(size)} ({size / limit_bytes:.4f} of it)"
        report.judge(subject, requirement, observed, size <= limit_bytes, **predicted, **vars(measured))

    return run


def _cache(setting: Setting) -> Path:
    return setting.folder / "warm.sqlite"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
