"""Steps of `remat.optimize` at small budgets, compared with eager mode."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.split_steps.models import (
    MODELS,
    Batch,
    Criterion,
    Logits,
    smoothed_cross_entropy,
)
from benchmarks.split_steps.steps import Steps, differences
from remat.frontend.memory.meter import LiveStorageMeter

Row = dict[str, Any]

BUDGETS = ("50%", "30%")
COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=10.0)


def rows_of(name: str) -> list[Row]:
    """Return a row for each budget of a model."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    is_outside = isinstance(model, Logits)
    copied = copy.deepcopy(model)
    eager = run_steps(
        Criterion(copied) if is_outside else copied, copied, batch, positional=is_outside
    )
    rows: list[Row] = []
    for budget in BUDGETS:
        row: Row = {"model": name, "budget": budget, "eager_bytes": eager.peaks_bytes[0]}
        row |= _unsplit_figures(copy.deepcopy(model), batch, budget)
        row |= _split_figures(copy.deepcopy(model), batch, budget, eager)
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _optimized(model: nn.Module, batch: Batch, budget: str, split: str) -> remat.RematModule:
    options: dict[str, Any] = {"costs": COSTS, "strategy": STRATEGY, "split": split}
    if isinstance(model, Logits):
        return remat.optimize(
            model, budget, tuple(batch.values()), loss=smoothed_cross_entropy, **options
        )
    return remat.optimize(model, budget, example_kwargs=batch, outputs="loss", **options)


def _unsplit_figures(model: nn.Module, batch: Batch, budget: str) -> Row:
    started_s = time.perf_counter()
    try:
        plan = _optimized(model, batch, budget, "off").plan
    except remat.InfeasibleBudget as error:
        figures: Row = {"unsplit_min_bytes": error.min_feasible_bytes}
    else:
        assert plan is not None
        figures = {"unsplit_overhead": round(plan.overhead, 4)}
    return figures | {"unsplit_planning_s": round(time.perf_counter() - started_s, 1)}


def _split_figures(model: nn.Module, batch: Batch, budget: str, eager: Steps) -> Row:
    started_s = time.perf_counter()
    try:
        step = _optimized(model, batch, budget, "auto")
    except remat.InfeasibleBudget as error:
        return {"min_bytes": error.min_feasible_bytes}
    planning_s = round(time.perf_counter() - started_s, 1)
    plan = step.plan
    assert plan is not None
    steps = run_steps(step, model, batch, positional=isinstance(model, Logits))
    errors = differences(eager, steps, losses=2)
    return {
        "planning_s": planning_s,
        "baseline_bytes": plan.baseline_peak_bytes,
        "predicted_bytes": plan.peak_bytes,
        "peaks_bytes": steps.peaks_bytes,
        "budgets_bytes": steps.budgets_bytes,
        "overhead": round(plan.overhead, 4),
        "lower_bound": plan.lower_bound,
        "splits": [[s.module, s.pieces, s.rows] for s in plan.graph.splits],
        "loss_differences": errors[:2],
        "largest_gradient_difference": max(errors[2:]),
        "equal_gradients": sum(d == 0 for d in errors[2:]),
        "gradients": len(errors) - 2,
    }


def run_steps(step: Any, model: nn.Module, batch: Batch, *, positional: bool) -> Steps:
    """Run two steps of `step`; the second adds to the gradients of the first."""
    result = Steps([], [], [])
    args, kwargs = (tuple(batch.values()), {}) if positional else ((), batch)
    for number in range(2):
        torch.manual_seed(number)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*model.parameters(), *model.buffers(), *batch.values(), *gradients)
        }
        meter = LiveStorageMeter(sum(storages.values()))
        with meter:
            output = step(*args, **kwargs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            result.values.append(loss.detach())
            del output
            loss.backward()
        result.peaks_bytes.append(meter.peak_bytes)
        plan = getattr(step, "plan", None)
        result.budgets_bytes.append(plan.budget_bytes if plan else 0)
    result.values.extend(p.grad for p in model.parameters() if p.grad is not None)
    return result


def _line(row: Row) -> str:
    unsplit = (
        f"infeasible below {row['unsplit_min_bytes'] / row['eager_bytes']:.0%}"
        if "unsplit_min_bytes" in row
        else f"{row['unsplit_overhead']:+.1%}"
    )
    head = f"{row['model']}, {row['budget']}: unsplit {unsplit}; "
    if "peaks_bytes" not in row:
        return f"{head}infeasible below {row['min_bytes'] / row['eager_bytes']:.0%}"
    peaks = [
        f"{peak / budget:.4f}"
        for peak, budget in zip(row["peaks_bytes"], row["budgets_bytes"], strict=True)
    ]
    return (
        f"{head}split {row['splits']} {row['overhead']:+.1%}, peaks {', '.join(peaks)} of the "
        f"budgets, differences {max(row['loss_differences']):.1e} of the losses and "
        f"{row['largest_gradient_difference']:.1e} of the gradients, of which "
        f"{row['equal_gradients']} of {row['gradients']} are equal"
    )
