"""Steps 6, 7 and 8: seconds of a step against eager's, predicted ones and other methods'."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import nn

import remat
from benchmarks.gpu.device import (
    free_unused_memory,
    interleaved_step_times,
    is_cuda,
    make_cuda_graphs,
    measure_peaks,
)
from benchmarks.gpu.memory import optimize_workload, plan_figures
from benchmarks.gpu.models import Positional
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.measurement import resident_tensors
from benchmarks.harness.methods import (
    per_block_method,
    run_step,
)
from benchmarks.models.workloads import Workload
from remat.limits.units import format_bytes

Times = dict[str, list[float]]


def time_ratio(times: Times, name: str, to: str) -> float:
    """Return the median over the rounds of the ratio of two methods' step times."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def median_ms(times: Times, name: str) -> str:
    """Return the median step time of a method as text, in milliseconds."""
    return f"{statistics.median(times[name]) * 1e3:.2f} ms"


def check_keep_all(build_workload: WorkloadBuilder, limit: float) -> PartFunction:
    """Step 6 for one size: compare the budget "100%", also as CUDA graphs, with eager mode.

    `limit` is the allowed ratio of remat's step time to eager's.
    """

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        gm = optimize_workload(workload, "100%", setting)
        rounds, steps = setting.sized((15, 10), (2, 1))
        steps_by_name = step_functions({"eager": workload.model, "remat": gm}, workload)
        with setting.gpu():
            times = interleaved_step_times(steps_by_name, device, rounds, steps)
        ratio = time_ratio(times, "remat", "eager")
        observed = f"{ratio:.3f} of eager's {median_ms(times, 'eager')}"
        report.judge("100%", f"<= {limit:g} of eager", observed, ratio <= limit, times=times)
        names, args = tuple(workload.batch), tuple(workload.batch.values())
        capturable = optimize_workload(workload, "100%", setting, cuda_graphs=True)
        with setting.gpu():
            # A cache of casts would be filled outside of the graph that reads it.
            with workload.autocast_context(has_cache=False):
                module = make_cuda_graphs(Positional(capturable, names), args, device)
            steps_by_name["graphed"] = lambda: _positional_step(module, args, workload)
            times = interleaved_step_times(steps_by_name, device, rounds, steps)
        ratio, requirement = time_ratio(times, "graphed", "eager"), "< 1 of eager"
        if is_cuda(device):
            observed = f"{ratio:.3f} of eager's {median_ms(times, 'eager')}"
            report.judge("100% as CUDA graphs", requirement, observed, ratio < 1, times=times)
        else:
            report.skip("100% as CUDA graphs", requirement, "a CPU has none: it ran without")

    return run


def _positional_step(module: nn.Module, args: tuple[torch.Tensor, ...], workload: Workload) -> None:
    """Run forward and backward of a module that takes the batch as positional arguments."""
    workload.model.zero_grad(set_to_none=True)
    with workload.autocast_context():
        loss = module(*args)
    loss.backward()


def check_predicted_times(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 7 for one model: check the plan's seconds and overhead against measured ones."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload = build_workload(setting)
        report.info("model", workload.size)
        modules: dict[str, remat.RematModule] = {}
        for budget in ("100%", "70%", "50%"):
            try:
                modules[budget] = optimize_workload(workload, budget, setting, solve_s=15.0)
            except remat.InfeasibleBudget as error:
                report.judge(f"{budget}: a plan", "there is one", str(error), False)
        rounds, steps = setting.sized((9, 5), (2, 1))
        with setting.gpu():
            times = interleaved_step_times(
                step_functions(modules, workload), setting.device, rounds, steps
            )
        for budget, gm in modules.items():
            plan = gm.plan
            assert plan is not None
            launch_s = float(plan.stats.get("launch_s", 0.0))
            predicted_s, measured_s = max(plan.time_s, launch_s), statistics.median(times[budget])
            report.judge(
                f"{budget}: step",
                f"{predicted_s * 1e3:.2f} ms, within 5%",
                f"{measured_s * 1e3:.2f} ms ({predicted_s / measured_s - 1:+.1%} predicted)",
                abs(predicted_s / measured_s - 1) <= 0.05,
                **plan_figures(gm),
                device_s=plan.time_s,
                launch_s=launch_s,
                step_s=times[budget],
            )
            if budget != "100%":
                extra = time_ratio(times, budget, "100%") - 1
                report.judge(
                    f"{budget}: overhead",
                    f"{plan.overhead:+.1%}, within 3 points",
                    f"{extra:+.1%}",
                    abs(extra - plan.overhead) <= 0.03,
                )

    return run


def compare_methods(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 8 for one model: compare the extra time at the peak of per-block checkpointing."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload, device = build_workload(setting), setting.device
        report.info("model", workload.size)
        per_block = per_block_method(workload)
        assert per_block.module is not None
        with setting.gpu():
            peak_bytes = peak_of(per_block.module, workload, device)
        gm = optimize_workload(workload, peak_bytes, setting, solve_s=30.0)
        modules: dict[str, nn.Module] = {
            "eager": workload.model,
            "per-block": per_block.module,
            "remat": gm,
        }
        rounds, steps = setting.sized((9, 2), (2, 1))
        with setting.gpu():
            peak_bytes_by_name = {
                name: peak_of(module, workload, device) for name, module in modules.items()
            }
            times = interleaved_step_times(step_functions(modules, workload), device, rounds, steps)
        for name in modules:
            extra = time_ratio(times, name, "eager") - 1
            size_bytes = peak_bytes_by_name[name]
            report.info(
                name,
                f"{median_ms(times, name)} ({extra:+.1%}), {format_bytes(size_bytes)}",
                step_s=times[name],
                requested_bytes=size_bytes,
            )
        share = peak_bytes_by_name["remat"] / peak_bytes
        report.judge("remat's peak", "at most per-block's", f"{share:.4f} of it", share <= 1)
        per_block_extra = time_ratio(times, "per-block", "eager") - 1
        remat_extra = time_ratio(times, "remat", "eager") - 1
        report.judge(
            "extra time at per-block's peak",
            "<= 0.75 of per-block's",
            f"{remat_extra:+.1%} against {per_block_extra:+.1%}",
            remat_extra <= 0.75 * per_block_extra,
            **plan_figures(gm),
        )

    return run


def step_functions(
    modules: Mapping[str, nn.Module], workload: Workload
) -> dict[str, Callable[[], object]]:
    """Return for each module a function that runs one training step of the workload."""
    return {
        name: (lambda module=module: run_step(module, workload)) for name, module in modules.items()
    }


def peak_of(module: nn.Module, workload: Workload, device: torch.device) -> int:
    """Return the peak of the requested bytes in a warm step."""
    run_step(module, workload)
    workload.model.zero_grad(set_to_none=True)
    free_unused_memory(device)
    peaks = measure_peaks(lambda: run_step(module, workload), device, resident_tensors(workload))
    workload.model.zero_grad(set_to_none=True)
    return peaks.requested_bytes
