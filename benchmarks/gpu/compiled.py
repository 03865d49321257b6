"""Step 14: remat's backend for torch.compile at the peak of torch's own activation budget."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.gpu.device import free_unused_memory, interleaved_step_times, is_cuda
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.speed import median_ms, peak_of, step_functions, time_ratio
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.methods import (
    Method,
    copy_sharing_parameters,
    run_step,
    torch_budget_method,
    try_method,
)
from benchmarks.models.workloads import Workload
from remat.frontend.compile.backend import remat_backend
from remat.limits.units import format_bytes

REMAT = "remat"


def compare_compiled(build_workload: WorkloadBuilder, share: float = 0.5) -> PartFunction:
    """Step 14 for one model: peaks and times of plain Inductor, of `share` as torch's activation
    memory budget, and of remat's backend within the peak of that."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        on_cuda = is_cuda(device)
        backend = setting.sized("inductor", "aot_eager_decomp_partition")
        modules: dict[str, nn.Module] = {"eager": workload.model}
        peaks = {"eager": peak_of(workload.model, workload, device)}
        budget: int | str = "70%"
        for name in ("Inductor", f"torch's budget {share:g}", REMAT):
            free_unused_memory(device)
            if name == REMAT:
                method = try_method(name, lambda b=budget: _remat_method(workload, b))
            else:
                part = 1.0 if name == "Inductor" else share
                method = try_method(name, lambda p=part: torch_budget_method(workload, p, backend))
            if method.module is None:
                report.judge(name, "runs", f"failed: {method.failure[:300]}", False)
                continue
            modules[name] = method.module
            if on_cuda:  # on a CPU, the memory of compiled code is not counted
                budget = peaks[name] = peak_of(method.module, workload, device)
            report.info(f"{name}: set-up", f"{method.setup_s['total']:.0f} s")
        rounds, steps = setting.sized((9, 3), (2, 1))
        times = interleaved_step_times(step_functions(modules, workload), device, rounds, steps)
        for name in modules:
            extra = time_ratio(times, name, "eager") - 1
            size = format_bytes(peaks[name]) if name in peaks else "peak unknown"
            report.info(
                name, f"{median_ms(times, name)} ({extra:+.1%} to eager), {size}",
                step_s=times[name], requested_bytes=peaks.get(name),
            )  # fmt: skip
        other = f"torch's budget {share:g}"
        if REMAT in modules and other in modules:
            if on_cuda:
                ratio = peaks[REMAT] / peaks[other]
                report.judge("remat's peak", "at most torch's", f"{ratio:.4f} of it", ratio <= 1)
            ratio = time_ratio(times, REMAT, other)
            report.judge(
                "remat's time at that peak", "<= 1.01 of torch's", f"{ratio:.3f} of it",
                ratio <= 1.01,
            )  # fmt: skip

    return run


def _remat_method(workload: Workload, budget: int | str) -> Method:
    """Return the model compiled by remat's backend, after its first step."""
    workload.model.zero_grad(set_to_none=True)
    options = {"budget": budget, "time_limit": 10.0, "outputs": "dropped"}
    began_s = time.perf_counter()
    module = torch.compile(
        copy_sharing_parameters(workload.model), backend=remat_backend, options=options
    )
    run_step(module, workload)  # type: ignore[arg-type]
    return Method(REMAT, module, setup_s={"total": time.perf_counter() - began_s})  # type: ignore[arg-type]
