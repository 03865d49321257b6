"""Step 12: costs by data sheet against measured ones, and both against an eager step."""

from __future__ import annotations

import statistics
from collections import defaultdict

import torch

import remat
from benchmarks.gpu.device import interleaved_step_times, is_cuda
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.methods import run_step
from benchmarks.models.workloads import Workload
from remat.costs.devices import match_device

WITHIN = 0.15
"""The goal for the data sheet's error in the time of a step."""


def compare_costs(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 12 for one model: seconds of a step by data sheet, by measured operations, in eager
    mode, and by the profiler; and the operators with the largest seconds by each."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        workload.model.zero_grad(set_to_none=True)
        with workload.autocast_context():
            trace = remat.trace(workload.model, (), workload.batch)
        name = "cpu"
        if is_cuda(device):
            spec = match_device(torch.cuda.get_device_name(device))
            name = spec.name if spec else "h100"
        by_sheet = remat.measure(trace, remat.Roofline(name))
        rounds, steps = setting.sized((7, 5), (2, 1))
        with setting.gpu():
            by_device = remat.measure(trace, cache=setting.costs)
            times = interleaved_step_times(
                {"eager": lambda: run_step(workload.model, workload)}, device, rounds, steps
            )
            kernels_s = _kernel_seconds(workload) if is_cuda(device) else {}
        measured_s = statistics.median(times["eager"])
        sheet_s, device_s = (t.graph().total_cost_s for t in (by_sheet, by_device))
        figures = {
            "step_s": times["eager"],
            "sheet_s": sheet_s,
            "device_s": device_s,
            "kernels_s": sum(kernels_s.values()),
            "by_target": _by_target(by_sheet, by_device),
            "by_operator_in_profile": dict(sorted(kernels_s.items(), key=lambda i: -i[1])[:40]),
        }
        report.info("eager step", f"{measured_s * 1e3:.2f} ms")
        report.info(
            "measured operations",
            f"{device_s * 1e3:.2f} ms ({device_s / measured_s - 1:+.1%}); kernels by the profiler "
            f"{sum(kernels_s.values()) * 1e3:.2f} ms",
        )
        report.judge(
            f"data sheet of {name}",
            f"within {WITHIN:.0%}",
            f"{sheet_s * 1e3:.2f} ms ({sheet_s / measured_s - 1:+.1%})",
            abs(sheet_s / measured_s - 1) <= WITHIN,
            **figures,
        )

    return run


def _by_target(
    by_sheet: remat.Trace, by_device: remat.Trace
) -> dict[str, tuple[int, float, float]]:
    """Return for each operator its number of nodes, and seconds by data sheet and measured."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for sheet, device in zip(by_sheet.nodes, by_device.nodes, strict=True):
        if not sheet.view:
            row = sums[sheet.target]
            row[0] += 1
            row[1] += sheet.cost_s or 0.0
            row[2] += device.cost_s or 0.0
    largest = sorted(sums.items(), key=lambda item: -max(item[1][1:]))[:40]
    return {target: (int(n), s, d) for target, (n, s, d) in largest}


def _kernel_seconds(workload: Workload) -> dict[str, float]:
    """Return the device seconds of each operator in one profiled step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run_step(workload.model, workload)
    with torch.profiler.profile(activities=activities) as profile:
        run_step(workload.model, workload)
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total * 1e-6
        for event in profile.key_averages()
        if event.self_device_time_total and event.device_type != torch.profiler.DeviceType.CUDA
    }
