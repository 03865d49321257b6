"""The law of writes: operators that write into a part of a tensor stay writes in a plan. Values and
gradients equal eager mode's, bit for bit; without recomputation a step takes no more memory than
eager mode; and no budget that eager mode meets is infeasible.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.helpers.training.doors import DOORS, latest_plan, planned
from tests.helpers.training.steps import Step, assert_same, results
from tests.helpers.training.writes import FILLS, ROWS, WIDTH, WritingModel

import remat
from remat.frontend.memory.meter import measure_step
from remat.simulate import baseline_of

STRATEGY = remat.Auto(time_limit=1)

SCALAR_BYTES = 64
"""The upper limit of the bytes of constants in the model's code, such as the 0.5 of
`x[:, 3] = 0.5`: they exist during the whole step in a plan, and during one
operation in eager mode."""


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def step_of(model: Any, x: torch.Tensor) -> tuple[Step, int]:
    """Return one step, and its measured peak."""
    losses: list[torch.Tensor] = []

    def one() -> None:
        losses.append(model(x))
        losses[0].backward()

    model.zero_grad()
    peak_bytes = measure_step(one, [*model.parameters(), *model.buffers(), x]).peak_bytes
    return results(model, losses[0]), peak_bytes


def constant_bytes(gm: Any) -> int:
    """Return the bytes of the constants in the code of an optimised model."""
    constants = [p for p in gm.program.placeholders if p.kind == "constant"]
    items = [getattr(torch, p.tensor.dtype).itemsize for p in constants]
    return sum(n * math.prod(p.tensor.shape) for n, p in zip(items, constants, strict=True))


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
    eager, eager_bytes = step_of(model, x)
    gm = planned(copy.deepcopy(model), "optimize", "100%", example_inputs=x, strategy=STRATEGY)
    assert gm.plan is not None
    trace = remat.measure(remat.trace(model, x), remat.Roofline("cpu"))
    assert baseline_of(trace.graph()).peak_bytes <= eager_bytes + SCALAR_BYTES
    assert remat.estimate(model, x).peak_bytes <= eager_bytes + SCALAR_BYTES
    result, peak_bytes = step_of(gm, x)
    assert_same(result, eager)
    assert peak_bytes + constant_bytes(gm) == gm.plan.peak_bytes


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
    eager, eager_bytes = step_of(model, x)
    for budget in (eager_bytes, "min"):
        run = planned(copy.deepcopy(model), door, budget, strategy=STRATEGY)
        step_of(run, x)  # plans in its first step
        result, peak_bytes = step_of(run, x)
        assert_same(result, eager)
        assert peak_bytes <= eager_bytes + SCALAR_BYTES
        if door != "blocks":
            plan = latest_plan(run)
            assert peak_bytes <= plan.peak_bytes <= peak_bytes + SCALAR_BYTES
