"""Memory and gradients of losses as their users write them, planned with pieces of the logits.

One case is a loss. Each budget is a row: the peak of two steps against the plan, and the largest
difference of a gradient from eager mode's, relative to its largest element. The step returns the
loss only. Costs come from `Roofline("h100")`.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from tests.helpers.training.losses import LOSSES, Batch, Policy, batch_of
from tests.helpers.training.recorded_steps import relative_error
from torch import Tensor, nn

import remat
from benchmarks.software_gpu.eager_memory import STRATEGY, judged, peaks_of, refusal

BUDGETS = ("80%", "50%", "min")
SEQUENCES, TOKENS, WORDS, WIDTH = 8, 64, 2048, 32
TOLERANCE = 1e-6
"""The largest relative difference of a gradient: float32, summed over pieces."""

Row = dict[str, Any]


def cases() -> list[str]:
    """Return the names of the losses."""
    return list(LOSSES)


def run_case(case: str) -> list[Row]:
    """Return the rows of one loss, one for each budget."""
    torch.manual_seed(0)
    model = Policy(LOSSES[case], words=WORDS, width=WIDTH)
    batch = {name: tensor.cuda() for name, tensor in _batch().items()}
    eager = copy.deepcopy(model).cuda()
    _loss(eager, batch).backward()
    expected = _gradients(eager)
    del eager
    return [_row(case, model, batch, budget, expected) for budget in BUDGETS]


def _row(case: str, model: nn.Module, batch: Batch, budget: str, expected: list[Tensor]) -> Row:
    """Return the figures of a budget: bytes, pieces and the difference of gradients. `expected` are
    eager mode's gradients."""
    gc.collect()
    torch.cuda.empty_cache()
    planned = copy.deepcopy(model).cuda()
    try:
        gm = remat.optimize(
            planned, budget, (), batch, strategy=STRATEGY, costs=remat.Roofline("h100"),
            outputs="loss",
        )  # fmt: skip
    except remat.RematError as error:
        return {"loss": case, "budget": budget} | refusal(error)
    assert gm.plan is not None
    assert gm.program is not None

    def step() -> None:
        planned.zero_grad(set_to_none=True)
        _loss(gm, batch).backward()

    # The first step allocates the libraries' workspaces within it.
    peaks = [peaks_of(step) for _ in range(3)][1:]
    pairs = zip(expected, _gradients(planned), strict=True)
    largest = max(relative_error(gradient, other) for gradient, other in pairs)
    plan, predicted_bytes = gm.plan, gm.program.predicted_peak_bytes
    figures = judged(predicted_bytes, plan.budget_bytes, plan.graph.library_bytes, peaks)
    return {
        "loss": case,
        "budget": budget,
        **figures,
        "is_met": figures["is_met"] and largest <= TOLERANCE,
        "gradient_difference": largest,
        "pieces": [split.pieces for split in plan.graph.splits],
    }


def _batch() -> Batch:
    return batch_of(shape=(SEQUENCES, TOKENS), words=WORDS, width=WIDTH)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    result = model(**batch)
    return result[0] if isinstance(result, tuple) else result


def _gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters, on the CPU."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.cpu() for gradient in gradients if gradient is not None]
