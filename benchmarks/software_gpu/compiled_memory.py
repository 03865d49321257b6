"""Memory under torch.compile: torch's requested bytes against the verified peak.

One case is a model of `benchmarks.models.families` in one precision, in its smallest size: the
plans and kernels are real ones, and are ready in some seconds. cuDNN is off, as the software GPU
does not replace it: convolutions run as torch's own CUDA kernels with cuBLAS. Gradients are None
before each step, and the loss is the only output that is live during the backward. The workspaces
that libraries keep between steps are subtracted everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat
from benchmarks.harness.measurement import resident_tensors
from benchmarks.harness.methods import copy_sharing_parameters, run_step
from benchmarks.models.families import FAMILIES
from benchmarks.models.workloads import Workload
from remat.frontend.memory.meter import unique_bytes

BUDGETS = ("min", "75%", "50%", "30%")
""""min" is first: a later budget may be refused only if it is below that peak."""

DTYPES = ("bfloat16", "float32")
CUDA_GRAPHS_BUDGET = "75%"
SPLIT_OPTIONS: tuple[dict[str, Any], ...] = ({"outputs": "loss"}, {"outputs": "loss", "split": 8})
"""Options of steps that return the loss only, whole and in pieces."""
CONVOLUTIONS = ("resnet", "unet2d")
"""The models with convolutions, which would run in cuDNN."""

TIME_LIMIT_S = 5.0
_WARM_STEPS = 2
"""Some models set an attribute in their first call, and compile once more in the second."""
_MEASURED_STEPS = 2

Row = dict[str, Any]


def cases() -> list[str]:
    """Return the names of the cases, "MODEL-DTYPE"."""
    return [f"{model}-{dtype}" for model in FAMILIES for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of one case: plain torch.compile, each budget, and a budget with CUDA
    graphs."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, _, dtype = case.partition("-")
    setting = Setting(model, dtype, gpu_workload(model, getattr(torch, dtype)))
    rows = [setting.inductor_row()]
    for budget in BUDGETS:
        rows.append(setting.plan_row(budget, rows))
    rows += [setting.plan_row("min", rows, **options) for options in SPLIT_OPTIONS]
    return [*rows, setting.cuda_graphs_row(CUDA_GRAPHS_BUDGET, rows)]


def gpu_workload(model: str, dtype: torch.dtype, device: str = "cuda") -> Workload:
    """Return the smallest workload of a model on the GPU, with floating-point tensors of one dtype.
    A tensor that the batch has under two names stays one tensor."""
    torch.manual_seed(0)
    workload = FAMILIES[model](torch.device("cpu"), True)
    workload.model.to(device, dtype)
    config: Any = getattr(workload.model, "config", None)
    if model == "gpt2":  # else transformers logs the loss that it assumes, which breaks the graph
        workload.model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    if "pixel_values" in workload.batch:  # else the first call sets it, and the second recompiles
        config.problem_type = "single_label_classification"
    moved = {
        id(item): item.to(device, dtype if item.is_floating_point() else None)
        for item in workload.batch.values()
        if isinstance(item, torch.Tensor)
    }
    workload.batch = {name: moved.get(id(item), item) for name, item in workload.batch.items()}
    return workload


@dataclass(frozen=True)
class Setting:
    """A model in one precision, on the GPU."""

    model: str
    dtype: str
    workload: Workload

    def _row(self, budget: str, mode: str = "default") -> Row:
        row: Row = {"model": self.model, "dtype": self.dtype, "budget": budget, "mode": mode}
        if self.model in CONVOLUTIONS:
            row["note"] = "without cuDNN"
        return row

    def _model(self) -> nn.Module:
        """Return a copy of the model with the same parameters, once earlier code is freed."""
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return copy_sharing_parameters(self.workload.model)

    def _planned(self, budget: str, mode: str = "default", **options: Any) -> Any:
        """Return the model compiled by remat, before its first step."""
        options = {"time_limit": TIME_LIMIT_S, "outputs": "dropped", **options}
        return remat.compile(self._model(), budget, mode=mode, **options)

    def _warm_up(self, compiled: Any) -> None:
        for _ in range(_WARM_STEPS):
            run_step(compiled, self.workload)
        gc.collect()  # after a graph break, plain torch.compile retains the logits of a step, too

    def _measured_steps(self, compiled: Any) -> Row:
        """Return the peaks of some steps, without the bytes that libraries keep."""
        peaks = [step_peaks(compiled, self.workload) for _ in range(_MEASURED_STEPS)]
        library_bytes = library_workspace_bytes()
        return {
            "library_bytes": library_bytes,
            "requested_bytes": [requested - library_bytes for requested, _ in peaks],
            "allocated_bytes": [allocated - library_bytes for _, allocated in peaks],
        }

    def inductor_row(self) -> Row:
        """Measure plain torch.compile."""
        compiled = torch.compile(self._model())
        self._warm_up(compiled)
        return self._row("inductor") | self._measured_steps(compiled) | {"is_met": True}

    def plan_row(self, budget: str, earlier_rows: Sequence[Row], **options: Any) -> Row:
        """Compare the second and third step of remat's backend with the verified peak. A refusal
        must be of a budget below the smallest verified peak."""
        row = self._row(budget) | options
        before = len(remat.compiled_plans())
        compiled = self._planned(budget, **options)
        try:
            self._warm_up(compiled)
        except BackendCompilerFailed as error:
            return row | _refusal(error.inner_exception, budget, earlier_rows)
        row |= self._measured_steps(compiled)
        return row | _judged(row, self._plan_figures(before))

    def cuda_graphs_row(self, budget: str, earlier_rows: Sequence[Row]) -> Row:
        """Compare mode "reduce-overhead" with the verified peak: the step that records the graphs,
        less the workspace that each graph has for cuBLAS; and a step that replays them."""
        row = self._row(budget, "reduce-overhead")
        before = len(remat.compiled_plans())
        compiled = self._planned(budget, "reduce-overhead")
        try:
            library_bytes = torch.backends.cuda.cublas_workspace_size()
            plans = -1
            recorded, recorded_allocated = 0, 0
            while len(remat.compiled_plans()) > plans:  # then the step compiled nothing
                plans = len(remat.compiled_plans())
                recorded, recorded_allocated = step_peaks(compiled, self.workload)
            replayed, replayed_allocated = step_peaks(compiled, self.workload)
        except BackendCompilerFailed as error:
            return row | _refusal(error.inner_exception, budget, earlier_rows)
        row |= {
            "library_bytes": library_bytes,
            "requested_bytes": [recorded - library_bytes, replayed],
            "allocated_bytes": [recorded_allocated - library_bytes, replayed_allocated],
            "pool_bytes": graph_pool_bytes(),
        }
        return row | _judged(row, self._plan_figures(before))

    def _plan_figures(self, before: int) -> Row:
        """Return the figures of the plan of the code that runs, the latest; `before` plans are
        earlier. Each model here is one graph: remat verifies a graph, not the step of several."""
        latest = {plan.frame_id: plan for plan in remat.compiled_plans()[before:]}
        (plan,) = latest.values()
        assert plan.verified_bytes is not None
        resident_bytes = unique_bytes(resident_tensors(self.workload))
        limit_bytes = plan.budget_bytes
        return {
            "rounds": plan.rounds,
            "splits": [split.pieces for split in plan.plan.graph.splits],
            "budget_bytes": limit_bytes,
            "planned_bytes": plan.plan.peak_bytes,
            "verified_bytes": plan.verified_bytes + resident_bytes - plan.primals_bytes,
            "is_verified_within_budget": limit_bytes is None or plan.verified_bytes <= limit_bytes,
        }


def _judged(row: Row, figures: Row) -> Row:
    """Return the plan's figures and the verdict: requested bytes within the verified peak, and that
    within the budget."""
    margins = [figures["verified_bytes"] - requested for requested in row["requested_bytes"]]
    is_met = min(margins) >= 0 and figures["is_verified_within_budget"]
    return figures | {"margin_bytes": min(margins), "is_met": is_met}


def _refusal(error: BaseException, budget: str, earlier_rows: Sequence[Mapping[str, Any]]) -> Row:
    """Return the figures of a refused budget. It is a percentage of plain torch.compile's peak, and
    rightly refused if the smallest verified peak exceeds it."""
    row: Row = {"refused": _first_line(error), "is_met": False}
    verified = [r["verified_bytes"] for r in earlier_rows if r["budget"] == "min"]
    if isinstance(error, remat.InfeasibleBudget) and verified:
        peak_bytes = max(earlier_rows[0]["requested_bytes"])
        row["budget_bytes"] = round(float(budget.removesuffix("%")) / 100 * peak_bytes)
        row["is_met"] = verified[0] > row["budget_bytes"]
    return row


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def step_peaks(module: Any, workload: Workload) -> tuple[int, int]:
    """Run a step from gradients that are None, and return the peaks of requested and allocated
    bytes."""
    workload.model.zero_grad(set_to_none=True)
    torch.compiler.cudagraph_mark_step_begin()
    torch.cuda.reset_peak_memory_stats()
    run_step(module, workload)
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"]


def library_workspace_bytes() -> int:
    """Free the workspaces that cuBLAS keeps between steps, and return their bytes."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_stats()["requested_bytes.all.current"]


def graph_pool_bytes() -> int:
    """Return the bytes that the memory pools of CUDA graphs reserve."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if s["segment_pool_id"] != (0, 0))
