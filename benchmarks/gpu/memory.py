"""Steps 2, 3, 4 and 10: bytes that are predicted, requested, allocated and reserved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import remat
from benchmarks.gpu.device import Peaks, allocated_bytes, capped, is_cuda, peaks, settle
from benchmarks.gpu.lines import Report
from benchmarks.gpu.setting import Setting
from benchmarks.measuring import resident
from benchmarks.methods import step
from benchmarks.workloads import Workload
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.memory.device_memory import keeps_workspaces, library_bytes
from remat.limits.units import format_bytes

TOLERANCE_BYTES = 2 << 20

Make = Callable[[Setting], Workload]


def libraries(setting: Setting, report: Report) -> None:
    """Step 2: what matrix products leave allocated, on the thread of the forward and on that of the
    backward; and what linear layers add, which may run in another library."""
    device = setting.device
    expected_bytes = library_bytes(device, ["aten.mm.default"]) if keeps_workspaces() else 0
    left: dict[str, tuple[int, int]] = {}
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
        own_bytes = sum(map(_rounded, (y, gradient, x.grad, w.grad)))
        left[kind] = forward_bytes, allocated_bytes(device) - before - own_bytes
    what = "left by a product in forward, and in backward"
    want = f"{format_bytes(expected_bytes)} in all, within 2 MiB"
    if not is_cuda(device):
        report.skip(what, want, "a CPU's allocator keeps no count")
        return
    forward_bytes, all_bytes = left["product"]
    found = f"{format_bytes(forward_bytes)}, then {format_bytes(all_bytes)}"
    report.judge(what, want, found, abs(all_bytes - expected_bytes) <= TOLERANCE_BYTES, left=left)
    report.tell("linear layers add", format_bytes(left["linear"][1]))


def _rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def planned(
    work: Workload,
    budget: int | str,
    setting: Setting,
    *,
    solve_s: float = 10.0,
    cache: str = "",
    cuda_graphs: bool = False,
) -> remat.RematModule:
    """The model within a budget, by costs that are measured here."""
    work.model.zero_grad(set_to_none=True)  # with gradients there, accumulation is planned
    with work.precision():
        return remat.optimize(
            work.model,
            budget,
            (),
            work.batch,
            strategy=remat.Auto(gap=0.02, time_limit=setting.solve_s(solve_s)),
            cache=cache or setting.costs,
            cuda_graphs=cuda_graphs,
        )


def facts(gm: remat.RematModule) -> dict[str, object]:
    """What a plan predicts."""
    plan = gm.plan
    assert plan is not None
    assert gm.program is not None
    return {
        "budget_bytes": plan.stats.get("asked_budget_bytes", plan.budget_bytes),
        "predicted_peak_bytes": gm.program.predicted_peak_bytes,
        "predicted_overhead": plan.overhead,
        "status": plan.status.name,
        "stats": {key: value for key, value in plan.stats.items() if key.endswith("_bytes")},
    }


def budgets(make: Make, is_expandable: bool) -> Callable[[Setting, Report], None]:
    """Step 3 for one model: what is predicted against what is requested, allocated, reserved."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work, device = make(setting), setting.device
        report.tell("model", work.size)
        for budget in ("100%", "60%", "min"):
            try:
                gm = planned(work, budget, setting)
            except remat.InfeasibleBudget as error:
                report.judge(f"{budget}: a plan", "there is one", str(error), False)
                continue
            told = facts(gm)
            step(gm, work)  # libraries take their workspaces
            found = _peaks(gm, work, device)
            predicted = _int(told["predicted_peak_bytes"])
            share = found.requested_bytes / predicted
            report.judge(
                f"{budget}: requested",
                f"0.98 to 1 of the predicted {format_bytes(predicted)}",
                f"{share:.4f}",
                0.98 <= share <= 1,
                **told,
                **vars(found),
            )
            _judge_allocated(report, f"{budget}: allocated", told, found, is_expandable)
            del gm

    return run


def _peaks(gm: remat.RematModule, work: Workload, device: torch.device) -> Peaks:
    work.model.zero_grad(set_to_none=True)
    settle(device)
    return peaks(lambda: step(gm, work), device, resident(work))


def _judge_allocated(
    report: Report, what: str, told: dict[str, object], found: Peaks, is_expandable: bool
) -> None:
    limit_bytes = _int(told["budget_bytes"])
    want = f"at most the budget of {format_bytes(limit_bytes)}"
    if found.allocated_bytes is None or found.reserved_bytes is None:
        report.skip(what, want, "a CPU's allocator keeps no count")
        return
    text = (
        f"{format_bytes(found.allocated_bytes)} ({found.allocated_bytes / limit_bytes:.4f}), "
        f"reserved {format_bytes(found.reserved_bytes)}, {found.retries} retries"
    )
    prefix = "expandable_" if is_expandable else ""
    foreseen = told["stats"]
    assert isinstance(foreseen, dict)
    for kind in ("allocated", "reserved"):
        if (size := foreseen.get(f"{prefix}{kind}_peak_bytes")) is not None:
            text += f"; {format_bytes(int(size))} {kind} foreseen"
    if is_expandable:
        report.judge(what, want, text, found.allocated_bytes <= limit_bytes)
    else:
        report.tell(what, text)


def hard_limit(make: Make) -> Callable[[Setting, Report], None]:
    """Step 4 for one model: three steps at 60% where the device has no more than 1.05 of that."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        work, device = make(setting), setting.device
        report.tell("model", work.size)
        gm = planned(work, "60%", setting)
        limit_bytes = int(1.05 * _int(facts(gm)["budget_bytes"]))
        settle(device)
        what, want = "60%, where the device has 1.05 of that", "no out-of-memory error"
        with capped(device, limit_bytes):
            try:
                for _ in range(2):
                    step(gm, work)
                found = _peaks(gm, work, device)
            except torch.OutOfMemoryError as error:
                report.judge(what, want, str(error)[:300], False, **facts(gm))
                return
        retries = _retries(device)
        report.judge(
            what, want, f"three steps, {retries} retries", True, **facts(gm), **vars(found)
        )

    return run


def _retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if is_cuda(device) else 0


def first_process(make: Make) -> Callable[[Setting, Report], None]:
    """Step 10, first half: a process that fills a cost cache."""

    def run(setting: Setting, report: Report) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        cache = _cache(setting)
        cache.unlink(missing_ok=True)
        gm = planned(make(setting), "60%", setting, cache=str(cache))
        report.judge("a cost cache", "written", str(cache.name), cache.exists(), **facts(gm))

    return run


def second_process(make: Make) -> Callable[[Setting, Report], None]:
    """Step 10, second half: the first step of a process that measures nothing."""

    def run(setting: Setting, report: Report) -> None:
        what, want = "the first step with a warm cost cache", "within the budget"
        cache = _cache(setting)
        if not cache.exists():
            report.skip(what, want, "no cost cache: its first part did not finish")
            return
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        work, device = make(setting), setting.device
        gm = planned(work, "60%", setting, cache=str(cache))
        found = _peaks(gm, work, device)  # no step before it
        told = facts(gm)
        limit_bytes = _int(told["budget_bytes"])
        size = found.requested_bytes if found.allocated_bytes is None else found.allocated_bytes
        text = f"{format_bytes(size)} ({size / limit_bytes:.4f} of it)"
        report.judge(what, want, text, size <= limit_bytes, **told, **vars(found))

    return run


def _cache(setting: Setting) -> Path:
    return setting.folder / "warm.sqlite"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
