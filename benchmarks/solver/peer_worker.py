"""Worker process that runs one model of `peers` at several peaks: a job on stdin, rows on stdout.

Gradients exist from the start and are accumulated, as in the peers' measurements. Peaks are those
of live storages, without parameters, buffers, gradients and batch. FLOPs are those of matmuls and
convolutions.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.harness.methods import copy_sharing_parameters
from benchmarks.solver.peer_models import Gpt, ResNet
from remat.costs.roofline import count_flops
from remat.frontend.memory.meter import measure_step, unique_bytes
from remat.passes.gradient_accumulation import with_gradient_accumulation

FLOPS_ONLY = remat.Roofline.custom("FLOPs", fp32_flops_per_s=1e12, bytes_per_s=1e18, launch_s=1e-12)
"""A device whose costs are FLOPs: memory traffic and launches take almost no time."""


class _Flops(TorchDispatchMode):
    """Counts FLOPs, but not those of fused attention: the peers' figures leave them out."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if "attention" not in str(func):
            self.flops += count_flops(str(func), args)
        return func(*args, **(kwargs or {}))


def main() -> int:
    """Read the job, run the model, and print the rows."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, batch = example(job["model"])
    print(json.dumps({"rows": list(measure_rows(model, batch, job))}))
    return 0


def example(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the named model in training mode, and its batch."""
    if name == "gpt":
        return Gpt().train(), torch.randint(0, 1000, (8, 256))
    return ResNet().train(), torch.randn(32, 3, 32, 32)


def measure_rows(
    model: nn.Module, batch: torch.Tensor, job: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    """Yield rows of eager mode and per-block checkpointing.

    If the job contains eager's row, yield rows of remat at each peak of the job instead.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if job["eager"]:
        yield from _planned(model, batch, job, job["eager"])
        return
    eager = measure_usage(model, model, batch)
    yield {"method": "eager", **eager, **_ratios(eager, eager)}
    with_checkpoints = copy_sharing_parameters(model)
    for block in with_checkpoints.get_submodule("blocks").children():
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    blocks = measure_usage(with_checkpoints, model, batch)
    yield {"method": "per-block checkpoint", **blocks, **_ratios(blocks, eager)}


def _planned(
    model: nn.Module, batch: torch.Tensor, job: dict[str, Any], eager: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    """Yield the rows of remat at each target peak of the job, with each kind of costs."""
    for target in job["targets"]:
        peak = target.get("peak_bytes") or target["peak_ratio"] * eager["peak_bytes"]
        for costs in job["costs"]:
            row = remat_at_peak(model, batch, int(peak), costs, job)
            yield {**target, "costs": costs, **row, **_ratios(row, eager)}


def remat_at_peak(
    model: nn.Module, batch: torch.Tensor, peak_bytes: int, costs: str, job: dict[str, Any]
) -> dict[str, Any]:
    """Return the row of remat at a peak, which does not count the tensors from before the step."""
    budget_bytes = peak_bytes + unique_bytes(resident_tensors(model, batch))
    strategy = remat.Auto(gap=job["gap"], time_limit=job["time_limit"])
    began = time.perf_counter()
    row: dict[str, Any] = {"method": "remat", "asked_bytes": peak_bytes}
    try:
        traced = with_gradient_accumulation(remat.trace(model, (batch,)))
        if costs == "flops":
            traced = price_by_flops(traced)
        else:
            traced = remat.measure(traced, "cpu", cache=job["cache"])
        plan = remat.solve(traced, budget_bytes, strategy)
        program = remat.rewrite(traced, plan.schedule)
        module = remat.lower(program, model, plan=plan)
    except remat.RematError as error:
        return row | {"failure": f"{type(error).__name__}: {error}"[:500]}
    setup_s = time.perf_counter() - began
    facts = {"setup_s": setup_s, "gap": plan.gap, "status": plan.status.name}
    facts["predicted_peak_bytes"] = plan.peak_bytes - (budget_bytes - peak_bytes)
    return row | facts | measure_usage(module, model, batch)


def price_by_flops(trace: remat.Trace) -> remat.Trace:
    """Return the trace with FLOPs as costs, without fused attention, as the peers count."""
    priced = remat.measure(trace, FLOPS_ONLY)
    nodes = tuple(
        node.model_copy(update={"cost_s": 0.0}) if "attention" in node.target else node
        for node in priced.nodes
    )
    return priced.replace(nodes=nodes)


def measure_usage(module: nn.Module, model: nn.Module, batch: torch.Tensor) -> dict[str, int]:
    """Return the FLOPs of a warm step, and its peak without the tensors from before it."""

    def step() -> None:
        module(batch).backward()

    step()
    constants = resident_tensors(model, batch)
    peak_bytes = measure_step(step, constants).peak_bytes - unique_bytes(constants)
    with _Flops() as counted:
        step()
    return {"peak_bytes": peak_bytes, "flops": counted.flops}


def resident_tensors(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors from before the step: parameters, buffers, gradients, batch."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, batch]


def _ratios(row: dict[str, Any], eager: dict[str, Any]) -> dict[str, float]:
    """Return a row's peak and FLOPs relative to eager's."""
    if "flops" not in row:
        return {}
    return {
        "peak_to_eager": row["peak_bytes"] / eager["peak_bytes"],
        "flops_to_eager": row["flops"] / eager["flops"],
    }


def _checkpointed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


if __name__ == "__main__":
    raise SystemExit(main())
