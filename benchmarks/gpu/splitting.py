"""Step 11: budgets below the smallest peak of an unsplit model are met, at what time."""

from __future__ import annotations

import copy

import torch

import remat
from benchmarks.gpu.device import interleaved_step_times, is_cuda
from benchmarks.gpu.memory import optimize_workload, plan_figures
from benchmarks.gpu.setting import PartFunction, Setting, WorkloadBuilder
from benchmarks.gpu.speed import median_ms, peak_of, step_functions, time_ratio
from benchmarks.gpu.verdicts import Report
from benchmarks.harness.methods import per_block_method, run_step
from benchmarks.models.workloads import Workload
from remat.limits.units import format_bytes

LOSS_TOLERANCE = 1e-2
"""The largest relative difference of a loss in bfloat16, whose rounding depends on kernels."""


def check_split(build_workload: WorkloadBuilder) -> PartFunction:
    """Step 11 for one model: plans whose operations may be in pieces, at the peak of per-block
    checkpointing and below it; their bytes, times and losses."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        workload = build_workload(setting)
        report.info("model", workload.size)
        eager_loss = float(run_step(workload.model, workload))
        per_block = per_block_method(workload).module
        assert per_block is not None
        sizes = [peak_of(m, workload, setting.device) for m in (workload.model, per_block)]
        extra, shown = _extra_time(setting, workload, "per-block", per_block)
        report.info(
            "per-block",
            f"{shown}, {format_bytes(sizes[1])}; eager {format_bytes(sizes[0])}",
            peak_bytes=sizes,
            extra=extra,
        )
        for budget in (sizes[1], "70%", "50%", "30%"):
            name = budget if isinstance(budget, str) else "per-block's peak"
            try:
                gm = optimize_workload(workload, budget, setting, outputs="loss")
            except remat.InfeasibleBudget as error:
                report.judge(f"{name}: a plan", "there is one", str(error), False)
                continue
            _check_plan(setting, report, workload, name, gm, eager_loss)
            del gm
        _check_gradients(setting, report)

    return run


def _check_plan(
    setting: Setting,
    report: Report,
    workload: Workload,
    name: str,
    gm: remat.RematModule,
    eager_loss: float,
) -> None:
    """Report bytes, loss and time of a planned step."""
    assert gm.plan is not None
    pieces = [[s.module, s.pieces] for s in gm.plan.graph.splits]
    figures = plan_figures(gm)
    loss_error = abs(float(run_step(gm, workload)) - eager_loss) / abs(eager_loss)
    report.judge(
        f"{name}: loss", f"within {LOSS_TOLERANCE:g}", f"{loss_error:.2g}",
        loss_error <= LOSS_TOLERANCE,
    )  # fmt: skip
    predicted_bytes = figures["predicted_peak_bytes"]
    assert isinstance(predicted_bytes, int)
    requested_bytes = peak_of(gm, workload, setting.device)
    share = requested_bytes / predicted_bytes
    report.judge(
        f"{name}: requested",
        f"0.98 to 1 of the predicted {format_bytes(predicted_bytes)}",
        f"{share:.4f}",
        0.98 <= share <= 1,
        requested_bytes=requested_bytes,
        **figures,
    )
    extra, shown = _extra_time(setting, workload, name, gm)
    report.judge(
        f"{name}: time",
        f"{gm.plan.overhead:+.1%}, within 3 points",
        f"{shown}; pieces {pieces or 'none'}",
        abs(extra - gm.plan.overhead) <= 0.03,
        extra=extra,
        pieces=pieces,
    )


def _extra_time(
    setting: Setting, workload: Workload, name: str, module: torch.nn.Module
) -> tuple[float, str]:
    """Return the extra time of a module's step relative to eager mode, and both as text."""
    rounds, steps = setting.sized((5, 2), (2, 1))
    times = interleaved_step_times(
        step_functions({"eager": workload.model, name: module}, workload),
        setting.device, rounds, steps,
    )  # fmt: skip
    extra = time_ratio(times, name, "eager") - 1
    return extra, f"{median_ms(times, name)} ({extra:+.1%} to {median_ms(times, 'eager')})"


def _check_gradients(setting: Setting, report: Report) -> None:
    """Compare the gradients of a head in pieces with those of eager mode, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    vocabulary, width = setting.sized((32_000, 1024), (64, 16))
    head = _Head(vocabulary, width).to(setting.device)
    rows = setting.sized(4096, 32)
    x = torch.randn(rows, width, device=setting.device)
    target = torch.randint(0, vocabulary, (rows,), device=setting.device)
    reference = copy.deepcopy(head)
    gm = remat.optimize(head, "min", (x, target), split=8, cache=setting.costs)
    errors = {}
    for module in (reference, gm):
        module(x, target).backward()
    for (name, p), q in zip(head.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        errors[name] = ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item()
    worst = max(errors.values())
    where = "CUDA" if is_cuda(setting.device) else "the CPU"
    report.judge(
        f"gradients of a head in 8 pieces on {where}", "within 1e-05", f"{worst:.2g}",
        worst <= 1e-5, **errors,
    )  # fmt: skip


class _Head(torch.nn.Module):
    """A layer, a projection to a vocabulary, and the loss."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        logits = self.head(torch.nn.functional.gelu(self.layer(x)))
        return torch.nn.functional.cross_entropy(logits, target)
