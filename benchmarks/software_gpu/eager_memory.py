"""Memory of eager plans: torch's own requested and allocated bytes against the prediction.

One case is a family in one precision. Costs are those of `Roofline("h100")`, workspaces included.
Families with convolutions are measured instead, for the workspaces that convolutions have without
cuDNN; the times of that measurement mean nothing. The workspaces of cuBLAS, which torch keeps once
they are allocated, are subtracted everywhere.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.software_gpu.families import (
    CONVOLUTIONAL,
    DTYPES,
    FAMILIES,
    NAMESPACES,
    Batch,
    build,
)
from remat.blockwise.blocks_plan import BlocksPlan
from remat.frontend.memory.device_memory import library_bytes
from remat.report.estimate import Estimate

BUDGETS = ("100%", "75%", "50%", "min")
LOSS_BUDGETS = ("30%", "min")
"""The budgets of steps that return the loss only: their largest operations may run in pieces."""
MIN_SHARE = 0.995
"""The least share of a prediction that the requested bytes must reach."""
ESTIMATE_TOLERANCE = 0.005

Row = dict[str, Any]

STRATEGY = remat.Auto(gap=0.05, time_limit=20.0)


def cases() -> list[str]:
    """Return the names of the cases, "FAMILY-DTYPE"."""
    return [f"{family}-{dtype}" for family in FAMILIES for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of one case: eager mode, then each budget by `optimize` and by `enable`."""
    family, _, dtype = case.partition("-")
    torch.backends.cudnn.enabled = False  # the software GPU does not replace cuDNN
    torch.backends.cuda.enable_cudnn_sdp(False)
    setting = Setting(family, dtype)
    return [
        setting.eager_row(),
        *(setting.optimize_row(budget) for budget in BUDGETS),
        *(setting.enable_row(budget) for budget in BUDGETS),
        setting.optimize_row("75%", outputs="dropped"),
        *(setting.optimize_row(budget, outputs="loss") for budget in LOSS_BUDGETS),
        setting.optimize_row("75%", accumulates=True),
    ]


@dataclass(frozen=True)
class Peaks:
    """Peaks of a step in bytes, without the workspaces of libraries."""

    requested_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Setting:
    """A family in one precision."""

    family: str
    dtype: str

    def _row(self, what: str, budget: str = "") -> Row:
        return {"family": self.family, "dtype": self.dtype, "what": what, "budget": budget}

    def _model(self) -> tuple[nn.Module, Batch]:
        """Return a new model with its batch on the GPU, once earlier ones are freed."""
        gc.collect()
        torch.cuda.empty_cache()
        return build(self.family, self.dtype)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype != "autocast":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def _step(
        self,
        run: Callable[..., Any],
        batch: Batch,
        *,
        drops_outputs: bool = False,
        is_backward_in_autocast: bool = False,
    ) -> None:
        """Run forward and backward. The outputs live until the end, unless they are dropped."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._autocast())
            outputs = run(**batch)
            if not is_backward_in_autocast:
                stack.close()
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
            if drops_outputs:
                del outputs
            loss.backward()

    def _peaks(
        self, run: Callable[..., Any], model: nn.Module, batch: Batch, **options: bool
    ) -> list[Peaks]:
        """Return the peaks of the second and third step; the first allocates the libraries'
        workspaces within it."""
        return [self._step_peaks(run, model, batch, **options) for _ in range(3)][1:]

    def _step_peaks(
        self,
        run: Callable[..., Any],
        model: nn.Module,
        batch: Batch,
        *,
        accumulates: bool = False,
        **options: bool,
    ) -> Peaks:
        if not accumulates:
            model.zero_grad(set_to_none=True)
        return peaks_of(lambda: self._step(run, batch, **options))

    def _costs(self) -> str | remat.Roofline:
        return "cuda" if self.family in CONVOLUTIONAL else remat.Roofline("h100")

    def _estimate(self, model: nn.Module, batch: Batch) -> Estimate:
        if self.family not in CONVOLUTIONAL:
            return remat.estimate(model, (), batch)
        return Estimate.of(remat.measure(remat.trace(model, (), batch), "cuda"))

    def eager_row(self) -> Row:
        """Compare the peak of eager mode with `remat.estimate`."""
        model, batch = self._model()
        try:
            with self._autocast():
                estimate = self._estimate(model, batch)
        except remat.RematError as error:
            return self._row("eager") | refusal(error)
        predicted = estimate.peak_bytes - estimate.library_bytes
        peaks = self._peaks(model, model, batch)
        errors = [abs(peak.requested_bytes / predicted - 1) for peak in peaks]
        return self._row("eager") | figures(
            predicted, peaks, None, max(errors) <= ESTIMATE_TOLERANCE
        )

    def optimize_row(self, budget: str, *, outputs: str = "held", accumulates: bool = False) -> Row:
        """Compare steps of `remat.optimize` with the plan's prediction."""
        what = "accumulation" if accumulates else "optimize" if outputs == "held" else outputs
        model, batch = self._model()
        if accumulates:
            self._step(model, batch)  # its gradients are there when the next step is planned
        try:
            with self._autocast():
                gm = remat.optimize(
                    model, budget, (), batch, strategy=STRATEGY, costs=self._costs(),
                    outputs=outputs, namespaces=NAMESPACES,
                )  # fmt: skip
        except remat.RematError as error:
            return self._row(what, budget) | refusal(error)
        drops_outputs = outputs != "held"
        peaks = self._peaks(gm, model, batch, drops_outputs=drops_outputs, accumulates=accumulates)
        assert gm.plan is not None
        assert gm.program is not None
        libraries = gm.plan.graph.library_bytes
        predicted_bytes = gm.program.predicted_peak_bytes
        row = self._row(what, budget) | judged(
            predicted_bytes, gm.plan.budget_bytes, libraries, peaks
        )
        return row | {"splits": [split.pieces for split in gm.plan.graph.splits]}

    def enable_row(self, budget: str) -> Row:
        """Compare steps of `remat.enable` by blocks with the plan's prediction.

        Code outside of blocks runs in eager mode. If the backward runs inside of autocast, autocast
        still holds the weights that it cast there. The plan predicts that case, so under autocast
        one more step is measured with its backward inside of autocast.
        """
        model, batch = self._model()
        try:
            with self._autocast():
                remat.enable(
                    model, budget, (), batch, scope="blocks", strategy=STRATEGY,
                    costs=self._costs(), namespaces=NAMESPACES,
                )  # fmt: skip
        except remat.RematError as error:
            return self._row("enable", budget) | refusal(error)
        peaks = self._peaks(model, model, batch)
        if self.dtype == "autocast":
            peaks.append(self._step_peaks(model, model, batch, is_backward_in_autocast=True))
        plan = remat.plans(model)[-1]
        assert isinstance(plan, BlocksPlan)
        return self._row("enable", budget) | judged(
            plan.peak_bytes, plan.budget_bytes, plan.graph.library_bytes, peaks
        )


def peaks_of(step: Callable[[], object]) -> Peaks:
    """Run a step, and return its peaks."""
    torch.cuda.reset_peak_memory_stats()
    step()
    stats = torch.cuda.memory_stats()
    libraries = workspace_bytes()
    return Peaks(
        stats["requested_bytes.all.peak"] - libraries,
        stats["allocated_bytes.all.peak"] - libraries,
    )


def workspace_bytes() -> int:
    """Return the bytes of cuBLAS's workspaces once both threads have used it."""
    return library_bytes("cuda", ["aten.mm.default"])


def refusal(error: remat.RematError) -> Row:
    """Return the figures of a plan that does not exist. A budget below the smallest peak counts as
    met: nothing exceeds it."""
    text = str(error).splitlines()[0][:300]
    return {"refused": text, "is_met": isinstance(error, remat.InfeasibleBudget)}


def judged(predicted_bytes: int, budget_bytes: int, libraries: int, peaks: list[Peaks]) -> Row:
    """Return the figures of a plan: the largest of the requested bytes must be between `MIN_SHARE`
    of the prediction and the prediction, allocated bytes within the budget. `libraries` is part of
    both figures."""
    predicted, budget = predicted_bytes - libraries, budget_bytes - libraries
    largest = max(peak.requested_bytes for peak in peaks)
    is_met = MIN_SHARE * predicted <= largest <= predicted and all(
        peak.allocated_bytes <= budget for peak in peaks
    )
    return figures(predicted, peaks, budget, is_met)


def figures(predicted: int, peaks: list[Peaks], budget: int | None, is_met: bool) -> Row:
    """Return a row's figures."""
    return {
        "predicted_bytes": predicted,
        "budget_bytes": budget,
        "requested_bytes": [peak.requested_bytes for peak in peaks],
        "allocated_bytes": [peak.allocated_bytes for peak in peaks],
        "share": max(peak.requested_bytes for peak in peaks) / predicted,
        "is_met": is_met,
    }
