"""Steps of `remat.compile` at small budgets, compared with eager mode and plain torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.split_steps.eager import BUDGETS
from benchmarks.split_steps.models import MODELS, Batch, Criterion, without_dropout
from benchmarks.split_steps.steps import Steps, differences
from remat.frontend.memory.meter import allocated_peak

Row = dict[str, Any]


def compiled_rows_of(name: str) -> list[Row]:
    """Return a row for each budget of a model under torch.compile."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    from transformers import GPT2LMHeadModel

    without_dropout(model.train())
    if name == "criterion outside":
        model = Criterion(model)
    if isinstance(model, GPT2LMHeadModel):
        model.loss_type = "ForCausalLM"  # Transformers knows none, and Dynamo breaks at its warning
    eager = _compiled_step(copy.deepcopy(model), batch, lambda model: model)
    plain = _compiled_step(copy.deepcopy(model), batch, torch.compile)
    rows: list[Row] = []
    for budget in BUDGETS:
        row: Row = {"model": name, "budget": budget, "plain_peak_bytes": plain.peaks_bytes[0]}
        row["plain_gradient_difference"] = max(differences(eager, plain, losses=1)[1:])
        try:
            options: dict[str, Any] = {"outputs": "loss", "time_limit": 20.0}
            step = _compiled_step(
                copy.deepcopy(model),
                batch,
                lambda model, b=budget, o=options: remat.compile(model, b, **o),
            )
        except Exception as error:
            row["failure"] = str(error).splitlines()[1 if "\n" in str(error) else 0][:300]
            rows.append(row)
            print(row, flush=True)
            continue
        plan = remat.compiled_plans()[-1]
        loss_difference, *gradients = differences(eager, step, losses=1)
        rows.append(
            row
            | {
                "baseline_bytes": plan.baseline_bytes,
                "budget_bytes": plan.budget_bytes,
                "verified_bytes": plan.verified_bytes,
                "peak_bytes": step.peaks_bytes[0],
                "overhead": round(plan.plan.overhead, 4),
                "unsplit_min_bytes": plan.plan.stats.get("unsplit_min_bytes"),
                "splits": [[s.module, s.pieces, s.rows] for s in plan.plan.graph.splits],
                "loss_difference": loss_difference,
                "largest_gradient_difference": max(gradients),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _compiled_step(model: nn.Module, batch: Batch, compile_: Callable[[nn.Module], Any]) -> Steps:
    """Return the loss and gradients of a compiled step, and the allocator's peak of a warm one."""
    torch._dynamo.reset()
    run = compile_(model)
    values: list[torch.Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = run(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        values[:] = [loss.detach()]
        del output
        loss.backward()

    step()
    values.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    result = list(values)
    model.zero_grad(set_to_none=True)
    constants = {t.untyped_storage().data_ptr(): t.nbytes for t in model.parameters()}
    constants |= {t.data_ptr(): t.nbytes for t in (*batch.values(), *model.buffers())}
    peak_bytes = allocated_peak(step) + sum(constants.values())
    return Steps([peak_bytes], [0], result)
