"""Steps 1, 5 and 9: every operation can be measured, and planned steps equal eager's."""

from __future__ import annotations

import copy

import torch
from torch import nn

import remat
from benchmarks.gpu.device import is_cuda, make_cuda_graphs, use_deterministic_kernels
from benchmarks.gpu.memory import optimize_workload, plan_figures
from benchmarks.gpu.models import Positional
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.methods import run_step
from benchmarks.models.workloads import Workload

TOLERANCE = 1e-4


def check_all_measured(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 1 for one model: check that every operation is measured and none estimated."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload = build_workload(setting)
        report.info("model", workload.size)
        with workload.autocast_context():
            trace = remat.trace(workload.model, (), workload.batch)
        trace = remat.measure(trace, cache=False)
        nodes = [node for node in trace.nodes if not node.view]
        estimated = {n.target: n.cost_source for n in nodes if n.cost_source.startswith("estim")}
        observed = f"{len(nodes)} operations, {len(estimated)} unmeasured"
        for target, why in list(estimated.items())[:3]:
            observed += f"; {target}: {why}"
        report.judge("measured", "exit 0, nothing unmeasured", observed, not estimated, **estimated)
        kernels = sorted({n.target for n in nodes if "scaled_dot_product" in n.target})
        if is_cuda(setting.device):
            report.judge("attention", "its kernels recorded", ", ".join(kernels), bool(kernels))
        else:
            report.info("attention", ", ".join(kernels) or "no fused kernel, as on any CPU")

    return run


def check_equals_eager(
    build_workload: WorkloadBuilder, budget: str, replays: int = 0
) -> PartFunction:
    """Step 5 for one model: compare loss, gradients, buffers and generator state with eager's.

    The plan must replay the RNG state at least `replays` times.
    """

    def run(setting: Setting, report: Report) -> None:
        device = setting.device
        use_deterministic_kernels(device)
        workload = build_workload(setting)
        report.info("model", workload.size)
        reference = copy.deepcopy(workload.model)
        gm = optimize_workload(workload, budget, setting)
        assert gm.program is not None
        rng_actions = [s.rng_action for s in (*gm.program.forward, *gm.program.backward)]
        if replays:
            minimum = setting.sized(replays, 1)
            count = rng_actions.count("replay")
            report.judge("replays in the plan", f"at least {minimum}", str(count), count >= minimum)
        loss, state = _seeded(reference, workload, device)
        remat_loss, remat_state = _seeded(gm, workload, device)
        report.judge(
            "loss",
            f"within {TOLERANCE:g}",
            f"{_error(loss, remat_loss):.2g} relative",
            _error(loss, remat_loss) <= TOLERANCE,
            **plan_figures(gm),
        )
        _judge_gradients(report, reference, workload.model)
        buffers = dict(reference.named_buffers())
        wrong = [
            name
            for name, buffer in workload.model.named_buffers()
            if _error(buffers[name], buffer) > TOLERANCE
        ]
        observed = f"{len(buffers) - len(wrong)} of {len(buffers)} are; {', '.join(wrong[:3])}"
        report.judge("buffers", f"within {TOLERANCE:g}", observed.rstrip("; "), not wrong)
        is_equal = torch.equal(state, remat_state)
        observed = "equal" if is_equal else "it differs"
        report.judge("generator state after the step", "equal", observed, is_equal)

    return run


def _seeded(
    module: nn.Module, workload: Workload, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step from a fixed seed; return its loss, and the generator's state after it.

    The gradients stay on the module's parameters.
    """
    torch.manual_seed(7)
    module.zero_grad(set_to_none=True)
    loss = run_step(module, workload)
    state = torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()
    return loss, state


def _judge_gradients(report: Report, reference: nn.Module, model: nn.Module) -> None:
    """Report the largest relative error of the gradients of `model` against `reference`."""
    parameters = dict(model.named_parameters())
    errors: dict[str, float] = {}
    equal_count = 0
    for name, parameter in reference.named_parameters():
        expected, actual = parameter.grad, parameters[name].grad
        if expected is None or actual is None:
            errors[name] = 0.0 if expected is actual else float("inf")
            continue
        errors[name] = _error(expected, actual)
        equal_count += torch.equal(expected, actual)
    worst = max(errors, key=lambda name: errors[name])
    report.judge(
        "gradients",
        f"within {TOLERANCE:g}",
        f"{errors[worst]:.2g} relative in {worst}; {equal_count} of {len(errors)} bit for bit",
        errors[worst] <= TOLERANCE,
        same=equal_count,
    )


def _error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element of `expected`."""
    expected, actual = expected.detach().double(), actual.detach().double()
    if not expected.numel():
        return 0.0
    return (expected - actual).abs().max().item() / max(expected.abs().max().item(), 1e-30)


def check_cuda_graphs(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 9: check that three steps with recomputation, as CUDA graphs, have eager's losses."""

    def run(setting: Setting, report: Report) -> None:
        device = setting.device
        use_deterministic_kernels(device)
        workload = build_workload(setting)
        report.info("model", workload.size)
        names, args = tuple(workload.batch), tuple(workload.batch.values())
        eager = Positional(copy.deepcopy(workload.model), names)
        gm = optimize_workload(workload, "60%", setting, cuda_graphs=True)
        assert gm.plan is not None
        recomputed_count = sum(gm.plan.schedule.recomputed(gm.plan.graph).values())
        report.judge("recomputed operations", "some", str(recomputed_count), recomputed_count > 0)
        module = make_cuda_graphs(Positional(gm, names), args, device)
        losses: list[list[float]] = []
        for module_under_test in (eager, module):
            torch.manual_seed(3)
            losses.append([_train_step(module_under_test, args, workload) for _ in range(3)])
        errors = [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]
        report.judge(
            "losses of three steps as CUDA graphs",
            f"eager's, within {TOLERANCE:g}",
            f"{max(errors):.2g} relative",
            max(errors) <= TOLERANCE,
            eager=losses[0],
            cuda_graphs=losses[1],
        )

    return run


def _train_step(module: nn.Module, args: tuple[torch.Tensor, ...], workload: Workload) -> float:
    """Run forward, backward and one step of gradient descent; return the loss."""
    module.zero_grad(set_to_none=True)
    with workload.autocast_context():
        loss = module(*args)
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return float(loss.detach())
