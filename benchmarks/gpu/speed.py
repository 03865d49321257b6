"""Steps 6, 7 and 8: seconds of a step, beside eager's, the predicted ones, and other methods'."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
import torch._dynamo
from torch import nn

import remat
from benchmarks.gpu.device import graphed, interleaved, is_cuda, peaks, settle
from benchmarks.gpu.lines import Report
from benchmarks.gpu.memory import facts, planned
from benchmarks.gpu.models import Positional
from benchmarks.gpu.setting import Setting
from benchmarks.measuring import resident
from benchmarks.methods import Method, attempt, per_block, step, torch_budget
from benchmarks.workloads import Workload
from remat.limits.units import format_bytes

Make = Callable[[Setting], Workload]
Times = dict[str, list[float]]


def ratio(times: Times, name: str, to: str) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def told(times: Times, name: str) -> str:
    """A step's median."""
    return f"{statistics.median(times[name]) * 1e3:.2f} ms"


def keeping_all(make: Make, limit: float) -> Callable[[Setting, Report], None]:
    """Step 6 for one size: "100%" and CUDA graphs beside eager mode."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work, device = make(setting), setting.device
        report.tell("model", work.size)
        gm = planned(work, "100%", setting)
        rounds, steps = setting.sized((15, 10), (2, 1))
        sides = _sides({"eager": work.model, "remat": gm}, work)
        times = interleaved(sides, device, rounds, steps)
        found = ratio(times, "remat", "eager")
        text = f"{found:.3f} of eager's {told(times, 'eager')}"
        report.judge("100%", f"<= {limit:g} of eager", text, found <= limit, times=times)
        names, args = tuple(work.batch), tuple(work.batch.values())
        own = planned(work, "100%", setting, cuda_graphs=True)
        module = graphed(Positional(own, names), args, device)
        sides["graphed"] = lambda: _positional_step(module, args, work)
        times = interleaved(sides, device, rounds, steps)
        found, want = ratio(times, "graphed", "eager"), "< 1 of eager"
        if is_cuda(device):
            text = f"{found:.3f} of eager's {told(times, 'eager')}"
            report.judge("100% as CUDA graphs", want, text, found < 1, times=times)
        else:
            report.skip("100% as CUDA graphs", want, "a CPU has none: it ran without")

    return run


def _positional_step(module: nn.Module, args: tuple[torch.Tensor, ...], work: Workload) -> None:
    work.model.zero_grad(set_to_none=True)
    with work.precision():
        loss = module(*args)
    loss.backward()


def predicted(make: Make) -> Callable[[Setting, Report], None]:
    """Step 7 for one model: seconds and overhead, as the plan has them and as they are."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work = make(setting)
        report.tell("model", work.size)
        modules: dict[str, remat.RematModule] = {}
        for budget in ("100%", "70%", "50%"):
            try:
                modules[budget] = planned(work, budget, setting, solve_s=15.0)
            except remat.InfeasibleBudget as error:
                report.judge(f"{budget}: a plan", "there is one", str(error), False)
        rounds, steps = setting.sized((9, 5), (2, 1))
        times = interleaved(_sides(modules, work), setting.device, rounds, steps)
        for budget, gm in modules.items():
            plan = gm.plan
            assert plan is not None
            launch_s = float(plan.stats.get("launch_s", 0.0))
            predicted_s, found_s = max(plan.time_s, launch_s), statistics.median(times[budget])
            report.judge(
                f"{budget}: step",
                f"{predicted_s * 1e3:.2f} ms, within 5%",
                f"{found_s * 1e3:.2f} ms ({predicted_s / found_s - 1:+.1%} predicted)",
                abs(predicted_s / found_s - 1) <= 0.05,
                **facts(gm),
                device_s=plan.time_s,
                launch_s=launch_s,
                step_s=times[budget],
            )
            if budget != "100%":
                extra = ratio(times, budget, "100%") - 1
                report.judge(
                    f"{budget}: overhead",
                    f"{plan.overhead:+.1%}, within 3 points",
                    f"{extra:+.1%}",
                    abs(extra - plan.overhead) <= 0.03,
                )

    return run


def beside_others(make: Make) -> Callable[[Setting, Report], None]:
    """Step 8 for one model: extra time at the peak of per-block checkpointing; then torch.compile
    and torch's own budget, which may take long or fail."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work, device = make(setting), setting.device
        report.tell("model", work.size)
        blocks = per_block(work)
        assert blocks.module is not None
        peak_bytes = _peak(blocks.module, work, device)
        gm = planned(work, peak_bytes, setting, solve_s=30.0)
        modules: dict[str, nn.Module] = {
            "eager": work.model,
            "per-block": blocks.module,
            "remat": gm,
        }
        found_bytes = {name: _peak(module, work, device) for name, module in modules.items()}
        rounds, steps = setting.sized((9, 2), (2, 1))
        times = interleaved(_sides(modules, work), device, rounds, steps)
        for name in modules:
            extra = ratio(times, name, "eager") - 1
            report.tell(
                name,
                f"{told(times, name)} ({extra:+.1%}), {format_bytes(found_bytes[name])}",
                step_s=times[name],
                requested_bytes=found_bytes[name],
            )
        share = found_bytes["remat"] / peak_bytes
        report.judge("remat's peak", "at most per-block's", f"{share:.4f} of it", share <= 1)
        theirs, own = (ratio(times, name, "eager") - 1 for name in ("per-block", "remat"))
        report.judge(
            "extra time at per-block's peak",
            "<= 0.75 of per-block's",
            f"{own:+.1%} against {theirs:+.1%}",
            own <= 0.75 * theirs,
            **facts(gm),
        )
        del modules, gm, blocks
        for share in (1.0, 0.5):
            _compiled(setting, report, work, share)

    return run


def _compiled(setting: Setting, report: Report, work: Workload, share: float) -> None:
    """torch.compile with torch's activation memory budget; 1 is what it does by default."""
    name = "torch.compile" if share == 1 else f"torch.compile, budget {share:g}"
    torch._dynamo.reset()
    settle(setting.device)
    backend = setting.sized("inductor", "aot_eager_decomp_partition")
    method: Method = attempt(name, lambda: torch_budget(work, share, backend))
    if method.module is None:
        report.tell(name, f"failed: {method.failure[:200]}")
        return
    modules = {"eager": work.model, name: method.module}
    rounds, steps = setting.sized((5, 2), (1, 1))
    times = interleaved(_sides(modules, work), setting.device, rounds, steps)
    extra = ratio(times, name, "eager") - 1
    text = f"{told(times, name)} ({extra:+.1%})"
    figures: dict[str, object] = {"step_s": times[name], **method.setup_s}
    if is_cuda(setting.device):  # on a CPU nobody counts what compiled code takes
        figures["requested_bytes"] = size = _peak(method.module, work, setting.device)
        text += f", {format_bytes(size)}"
    report.tell(name, text, **figures)


def _sides(modules: Mapping[str, nn.Module], work: Workload) -> dict[str, Callable[[], object]]:
    return {name: (lambda module=module: step(module, work)) for name, module in modules.items()}


def _peak(module: nn.Module, work: Workload, device: torch.device) -> int:
    """Requested bytes of a warm step."""
    step(module, work)
    work.model.zero_grad(set_to_none=True)
    settle(device)
    found = peaks(lambda: step(module, work), device, resident(work)).requested_bytes
    work.model.zero_grad(set_to_none=True)
    return found
