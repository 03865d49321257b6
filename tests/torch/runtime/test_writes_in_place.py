"""The law of writes: operators that write into a part of a tensor stay writes in a plan. Values and
gradients equal eager mode's, bit for bit; without recomputation a step takes no more memory than
eager mode; and no budget that eager mode meets is infeasible.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.writes import FILLS, ROWS, WIDTH, WritingModel
from torch import nn

import remat
from remat.frontend.memory.meter import measure_step
from remat.simulate import baseline_of

COSTS = remat.Roofline("cpu")
OPTIONS: dict[str, Any] = {"costs": COSTS, "split": "off", "strategy": remat.Auto(time_limit=1)}

DOORS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimize": lambda model, budget: remat.optimize(model, budget, **OPTIONS),
    "model": lambda model, budget: remat.enable(model, budget, scope="model", **OPTIONS),
    "blocks": lambda model, budget: remat.enable(model, budget, scope="blocks", **OPTIONS),
}

SCALAR_BYTES = 64
"""The upper limit of the bytes of constants in the model's code, such as the 0.5 of
`x[:, 3] = 0.5`: they exist during the whole step in a plan, and during one
operation in eager mode."""


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def step_of(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
    """Return the loss, the gradients and the measured peak of one step."""
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = model(x)
        loss.backward()
        losses.append(loss.detach())

    model.zero_grad()
    peak_bytes = measure_step(step, [*model.parameters(), *model.buffers(), x]).peak_bytes
    return losses[0], [p.grad for p in model.parameters()], peak_bytes


def constant_bytes(gm: Any) -> int:
    """Return the bytes of the constants in the code of an optimised model."""
    constants = [p for p in gm.program.placeholders if p.kind == "constant"]
    items = [getattr(torch, p.tensor.dtype).itemsize for p in constants]
    return sum(n * math.prod(p.tensor.shape) for n, p in zip(items, constants, strict=True))


def assert_same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual[0], expected[0])
    for gradient, eager in zip(actual[1], expected[1], strict=True):
        assert (gradient is None) == (eager is None)
        assert gradient is None or torch.equal(gradient, eager)


@pytest.mark.quick_cases(
    "masked_fill_of_a_view",
    "strided",
    "indexed_copies",
    "read_between_writes",
    "no_grad",
    "integers",
    "attention_mask",
    "view_of_other_type",
    "in_place_in_grad_mode",
    "fused",
)
@pytest.mark.parametrize("fill", FILLS)
def test_a_step_without_recomputation_takes_at_most_eager_mode_memory(fill: str) -> None:
    model, x = WritingModel(FILLS[fill]), batch()
    eager = step_of(model, x)
    gm = remat.optimize(copy.deepcopy(model), "100%", x, **OPTIONS)
    assert gm.plan is not None
    trace = remat.measure(remat.trace(model, x), COSTS)
    assert baseline_of(trace.graph()).peak_bytes <= eager[2] + SCALAR_BYTES
    assert remat.estimate(model, x).peak_bytes <= eager[2] + SCALAR_BYTES
    result = step_of(gm, x)
    assert_same(result, eager)
    assert result[2] + constant_bytes(gm) == gm.plan.peak_bytes


@pytest.mark.quick_cases("index_put_accumulate-optimize")
@pytest.mark.parametrize(
    ("fill", "door"),
    [
        pytest.param(
            fill,
            door,
            marks=[] if door == "optimize" and number % 3 == 0 else [pytest.mark.slow],
        )
        for number, fill in enumerate(FILLS)
        for door in DOORS
    ],
)
def test_recomputation_changes_no_value(fill: str, door: str) -> None:
    model, x = WritingModel(FILLS[fill]), batch()
    eager = step_of(model, x)
    for budget in (eager[2], "min"):
        planned = DOORS[door](copy.deepcopy(model), budget)
        step_of(planned, x)  # plans in its first step
        result = step_of(planned, x)
        assert_same(result, eager)
        assert result[2] <= eager[2] + SCALAR_BYTES
        if door != "blocks":
            plan = planned.plan if door == "optimize" else remat.plans(planned)[0]
            assert result[2] <= plan.peak_bytes <= result[2] + SCALAR_BYTES
