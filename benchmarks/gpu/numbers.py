"""Steps 1, 5 and 9: operations that can be measured, and steps that compute what eager's does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import remat
from benchmarks.gpu.device import exact, graphed, is_cuda
from benchmarks.gpu.lines import Report
from benchmarks.gpu.memory import facts, planned
from benchmarks.gpu.models import Positional
from benchmarks.gpu.setting import Setting
from benchmarks.methods import step
from benchmarks.workloads import Workload

TOLERANCE = 1e-4

Make = Callable[[Setting], Workload]


def measured(make: Make) -> Callable[[Setting, Report], None]:
    """Step 1 for one model: every operation is measured, nothing is estimated."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work = make(setting)
        report.tell("model", work.size)
        with work.precision():
            trace = remat.trace(work.model, (), work.batch)
        trace = remat.measure(trace, cache=False)
        nodes = [node for node in trace.nodes if not node.view]
        estimated = {n.target: n.cost_source for n in nodes if n.cost_source.startswith("estim")}
        text = f"{len(nodes)} operations, {len(estimated)} unmeasured"
        for target, why in list(estimated.items())[:3]:
            text += f"; {target}: {why}"
        report.judge("measured", "exit 0, nothing unmeasured", text, not estimated, **estimated)
        kernels = sorted({n.target for n in nodes if "scaled_dot_product" in n.target})
        if is_cuda(setting.device):
            report.judge("attention", "its kernels recorded", ", ".join(kernels), bool(kernels))
        else:
            report.tell("attention", ", ".join(kernels) or "no fused kernel, as on any CPU")

    return run


def as_eager(make: Make, budget: str, replays: int = 0) -> Callable[[Setting, Report], None]:
    """Step 5 for one model: loss, gradients, buffers and generator state are eager's."""

    def run(setting: Setting, report: Report) -> None:
        device = setting.device
        exact(device)
        work = make(setting)
        report.tell("model", work.size)
        reference = copy.deepcopy(work.model)
        gm = planned(work, budget, setting)
        assert gm.program is not None
        random = [s.random for s in (*gm.program.forward, *gm.program.backward)]
        if replays:
            want = setting.sized(replays, 1)
            found = random.count("replay")
            report.judge("replays in the plan", f"at least {want}", str(found), found >= want)
        loss, state = _seeded(reference, work, device)
        own_loss, own_state = _seeded(gm, work, device)
        report.judge(
            "loss",
            f"within {TOLERANCE:g}",
            f"{_error(loss, own_loss):.2g} relative",
            _error(loss, own_loss) <= TOLERANCE,
            **facts(gm),
        )
        _judge_gradients(report, reference, work.model)
        buffers = dict(reference.named_buffers())
        wrong = [
            name
            for name, found in work.model.named_buffers()
            if _error(buffers[name], found) > TOLERANCE
        ]
        text = f"{len(buffers) - len(wrong)} of {len(buffers)} are; {', '.join(wrong[:3])}"
        report.judge("buffers", f"within {TOLERANCE:g}", text.rstrip("; "), not wrong)
        is_equal = torch.equal(state, own_state)
        text = "equal" if is_equal else "it differs"
        report.judge("generator state after the step", "equal", text, is_equal)

    return run


def _seeded(
    module: nn.Module, work: Workload, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's loss, and the generator's state after it. Gradients are left on the module."""
    torch.manual_seed(7)
    module.zero_grad(set_to_none=True)
    loss = step(module, work)
    state = torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()
    return loss, state


def _judge_gradients(report: Report, reference: nn.Module, model: nn.Module) -> None:
    own = dict(model.named_parameters())
    errors: dict[str, float] = {}
    same = 0
    for name, parameter in reference.named_parameters():
        expected, found = parameter.grad, own[name].grad
        if expected is None or found is None:
            errors[name] = 0.0 if expected is found else float("inf")
            continue
        errors[name] = _error(expected, found)
        same += torch.equal(expected, found)
    worst = max(errors, key=lambda name: errors[name])
    text = f"{errors[worst]:.2g} relative in {worst}; {same} of {len(errors)} bit for bit"
    report.judge("gradients", f"within {TOLERANCE:g}", text, errors[worst] <= TOLERANCE, same=same)


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    expected, found = expected.detach().double(), found.detach().double()
    if not expected.numel():
        return 0.0
    return (expected - found).abs().max().item() / max(expected.abs().max().item(), 1e-30)


def graphs(make: Make) -> Callable[[Setting, Report], None]:
    """Step 9: three steps as CUDA graphs, with recomputation, have eager's losses."""

    def run(setting: Setting, report: Report) -> None:
        device = setting.device
        exact(device)
        work = make(setting)
        report.tell("model", work.size)
        names, args = tuple(work.batch), tuple(work.batch.values())
        eager = Positional(copy.deepcopy(work.model), names)
        gm = planned(work, "60%", setting, cuda_graphs=True)
        assert gm.plan is not None
        again = sum(gm.plan.schedule.recomputed(gm.plan.graph).values())
        report.judge("operations that run again", "some", str(again), again > 0)
        module = graphed(Positional(gm, names), args, device)
        losses: list[list[float]] = []
        for each in (eager, module):
            torch.manual_seed(3)
            losses.append([_trained(each, args, work) for _ in range(3)])
        errors = [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]
        report.judge(
            "losses of three steps as CUDA graphs",
            f"eager's, within {TOLERANCE:g}",
            f"{max(errors):.2g} relative",
            max(errors) <= TOLERANCE,
            eager=losses[0],
            graphed=losses[1],
        )

    return run


def _trained(module: nn.Module, args: tuple[torch.Tensor, ...], work: Workload) -> float:
    """Forward, backward, a step of gradient descent; the loss."""
    module.zero_grad(set_to_none=True)
    with work.precision():
        loss = module(*args)
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return float(loss.detach())
