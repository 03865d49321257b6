"""Step 15: plans that offload to the host, next to those that only recompute."""

from __future__ import annotations

import statistics

import torch
from torch import nn

import remat
from benchmarks.gpu.device import free_unused_memory, interleaved_step_times, is_cuda
from benchmarks.gpu.memory import optimize_workload, plan_figures
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.speed import Times, median_ms, peak_of, step_functions, time_ratio
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.methods import run_step
from benchmarks.harness.offloading import offload_everything
from benchmarks.models.workloads import Workload
from remat.frontend.planning.host_limits import measured_link
from remat.frontend.runtime.pinned_memory import pinned_memory
from remat.limits.units import format_bytes
from remat.passes.offload.copies import copy_times

RECOMPUTE, OFFLOAD = "recompute", "offload"


def check_offload(
    build_workload: WorkloadBuilder, budgets: tuple[str, ...], split: str
) -> PartFunction:
    """Step 15 for one model: bytes, seconds and numbers of plans with offloading and without."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload = build_workload(setting)
        report.info("model", workload.size)
        with setting.gpu():
            link = measured_link(setting.device, setting.costs)
        gb_per_s = [b / 1e9 for b in (link.to_host_bytes_per_s, link.to_device_bytes_per_s)]
        report.info("link", f"{gb_per_s[0]:.1f} GB/s to the host, {gb_per_s[1]:.1f} back")
        for budget in budgets:
            modules: dict[str, nn.Module] = {"eager": workload.model}
            for name in (RECOMPUTE, OFFLOAD):
                offload = "auto" if name == OFFLOAD else "off"
                try:
                    modules[name] = optimize_workload(
                        workload,
                        budget,
                        setting,
                        solve_s=15.0,
                        outputs="loss",
                        split=split,
                        offload=offload,
                    )
                except remat.InfeasibleBudget as error:
                    report.info(f"{budget}, {name}: a plan", str(error))
            if OFFLOAD not in modules:
                report.judge(f"{budget}: a plan", "there is one", "there is none", False)
                continue
            _check_plans(setting, report, workload, budget, modules)
            del modules
            free_unused_memory(setting.device)
        _check_waits(setting, report, workload)

    return run


def _check_plans(
    setting: Setting, report: Report, workload: Workload, budget: str, modules: dict[str, nn.Module]
) -> None:
    """Report bytes, seconds and numbers of the plans for one budget."""
    rounds, steps = setting.sized((7, 2), (2, 1))
    with setting.gpu():
        _check_numbers(report, workload, budget, modules)
        peaks = {name: peak_of(modules[name], workload, setting.device) for name in modules}
        times = interleaved_step_times(
            step_functions(modules, workload), setting.device, rounds, steps
        )
    for name, gm in modules.items():
        if not isinstance(gm, remat.RematModule):
            continue
        plan, figures = gm.plan, plan_figures(gm)
        assert plan is not None
        share = peaks[name] / plan.peak_bytes
        report.judge(
            f"{budget}, {name}: requested",
            f"0.98 to 1 of the predicted {format_bytes(plan.peak_bytes)}",
            f"{share:.4f}",
            0.98 <= share <= 1,
            requested_bytes=peaks[name],
            **figures,
        )
        extra = time_ratio(times, name, "eager") - 1
        copies_s, waiting_s = (float(plan.stats.get(k, 0.0)) for k in ("copies_s", "waiting_s"))
        copied = (
            f"; {format_bytes(plan.host_bytes)} on the host, copies of "
            f"{copies_s * 1e3:.1f} ms, {waiting_s * 1e3:.1f} ms of waiting predicted"
        )
        report.judge(
            f"{budget}, {name}: time",
            f"{plan.overhead:+.1%}, within 3 points",
            f"{median_ms(times, name)} ({extra:+.1%} to {median_ms(times, 'eager')})"
            + copied * (name == OFFLOAD),
            abs(extra - plan.overhead) <= 0.03,
            extra=extra,
            step_s=times[name],
            eager_step_s=times["eager"],
        )
    if RECOMPUTE in modules:
        ratio = time_ratio(times, OFFLOAD, RECOMPUTE)
        report.judge(
            f"{budget}: time with offloading", "<= 1.01 of that without", f"{ratio:.3f} of it",
            ratio <= 1.01,
        )  # fmt: skip


def _check_numbers(
    report: Report, workload: Workload, budget: str, modules: dict[str, nn.Module]
) -> None:
    """Compare loss and gradients of the plan that offloads with those of eager mode. Kernels with
    atomic additions differ from run to run, so the difference between two eager steps is reported,
    too."""
    runs = [_numbers(modules[name], workload) for name in ("eager", "eager", OFFLOAD)]
    (loss, expected), (_, repeated), (offload_loss, offloaded) = runs
    noise, error = _difference(expected, repeated), _difference(expected, offloaded)
    scale = max(abs(loss), 1e-9)
    exact = sum(map(torch.equal, expected, offloaded))
    report.judge(
        f"{budget}: loss and gradients",
        "those of eager mode, within 0.01 or twice what eager mode differs by",
        f"loss {abs(offload_loss - loss) / scale:.2g}, gradients {error:.2g} relative (eager "
        f"mode to itself {noise:.2g}); {exact} of {len(expected)} bit for bit",
        error <= max(1e-2, 2 * noise) and abs(offload_loss - loss) <= 1e-2 * scale,
    )


def _numbers(module: nn.Module, workload: Workload) -> tuple[float, list[torch.Tensor]]:
    """Return the loss and copies of the gradients of a step."""
    workload.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = float(run_step(module, workload))
    gradients = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
    workload.model.zero_grad(set_to_none=True)
    return loss, gradients


def _difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """Return the largest difference of two lists of gradients, relative to their norms."""
    return max(
        float((a - b).norm() / b.norm().clamp_min(1e-12))
        for a, b in zip(actual, expected, strict=True)
    )


def _pinned_bytes(setting: Setting) -> int:
    return pinned_memory(setting.device).pinned_bytes if is_cuda(setting.device) else 0


def _check_waits(setting: Setting, report: Report, workload: Workload) -> None:
    """Compare the predicted waiting of a step that offloads everything with the measured one."""
    workload.model.zero_grad(set_to_none=True)
    with workload.autocast_context():
        trace = remat.trace(workload.model, (), workload.batch, outputs="dropped")
        with setting.gpu():
            trace = remat.measure(trace, cache=setting.costs)
    link = measured_link(setting.device, setting.costs)
    modules: dict[str, nn.Module] = {}
    for name, t in (("retain", trace), (OFFLOAD, offload_everything(trace, link))):
        graph = t.graph()
        program = remat.rewrite(t, remat.Schedule.keep_all(graph))
        modules[name] = remat.lower(program, workload.model)
    copies = copy_times(graph, range(len(graph)), link)
    pinned_bytes = _pinned_bytes(setting)
    rounds, steps = setting.sized((5, 1), (2, 1))
    with setting.gpu():
        times: Times = interleaved_step_times(
            step_functions(modules, workload), setting.device, rounds, steps
        )
    waits_s = statistics.median(a - b for a, b in zip(times[OFFLOAD], times["retain"], strict=True))
    subject, requirement = "waiting if everything is offloaded", "within 20% of the predicted"
    observed = (
        f"{waits_s * 1e3:.1f} ms of {median_ms(times, OFFLOAD)}, predicted "
        f"{copies.waiting_s * 1e3:.1f} ms; {format_bytes(copies.largest_host_bytes)} on the host, "
        f"copies of {copies.copying_s * 1e3:.1f} ms"
    )
    pinned = [format_bytes(size) for size in (pinned_bytes, _pinned_bytes(setting))]
    report.info("pinned before and after these steps", " and ".join(pinned))
    if not is_cuda(setting.device):
        report.skip(subject, requirement, "on a CPU, benchmarks.offload_steps measures it")
        return
    is_met = abs(waits_s - copies.waiting_s) <= 0.2 * copies.waiting_s
    report.judge(subject, requirement, observed, is_met, step_s=times)
