"""torch.compile(backend="remat") with the budget "min": never above another feasible budget, and no
longer to plan than the time limit allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    Convolutions,
    blocks,
    compiled_as_without,
    plans_of,
    two_steps,
    with_state,
)
from tests.helpers.training.models import Case, language_model
from torch import nn

from remat.errors import InfeasibleBudget
from remat.frontend.compile.compat import cause_of_type
from remat.frontend.compile.compile_options import TIME_LIMIT_S
from remat.frontend.compile.registry import CompiledPlan
from remat.limits.units import format_bytes

pytestmark = pytest.mark.usefixtures("empty_compile_caches")

PERCENTAGES = (70, 55, 45, 35, 25)


class Attention(nn.Module):
    """Two layers of attention whose scores are larger than its inputs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + F.dropout((q @ k.mT).softmax(-1), 0.1) @ v
        return x.square().mean()


def wide_mlp() -> Case:
    """Return a perceptron whose hidden rows are much larger than its inputs."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(2)]
    return Case(nn.Sequential(*layers), (torch.randn(256, 16),), loss=lambda out: out.sum())


def small_convolutions() -> Case:
    torch.manual_seed(0)
    return Case(Convolutions(2, 16), (torch.randn(16, 3, 24, 24),), loss=lambda out: out)


def attention() -> Case:
    torch.manual_seed(0)
    return Case(Attention(), (torch.randn(4, 64, 16),), loss=lambda out: out)


MODELS: dict[str, Callable[[], Case]] = {
    "wide MLP": wide_mlp,
    "convolutions": small_convolutions,
    "attention": attention,
    "language model": language_model,
    "blocks": blocks,
}


def plan_of(case: Case, budget: str, **options: Any) -> CompiledPlan | None:
    """Return the plan of a step within a budget; None if no plan fits it."""
    try:
        (plan,) = plans_of(case, budget, **{"inductor": False, "time_limit": 8.0, **options})
    except Exception as error:
        if cause_of_type(error, InfeasibleBudget) is None:
            raise
        return None
    return plan


@pytest.mark.slow
def test_the_smallest_budget_tries_pieces(caplog: pytest.LogCaptureFixture) -> None:
    """The peak is that of the logits without pieces, and far smaller with them."""
    whole = plan_of(language_model(), "min", split="off", time_limit=1.0)
    with caplog.at_level(logging.INFO, "remat"):
        in_pieces = plan_of(language_model(), "min", time_limit=1.0)
    assert whole is not None
    assert in_pieces is not None
    assert in_pieces.plan.peak_bytes < 0.8 * whole.plan.peak_bytes
    assert in_pieces.plan.stats["unsplit_min_bytes"] == whole.plan.peak_bytes
    (split,) = in_pieces.plan.graph.splits
    peaks = [format_bytes(plan.plan.peak_bytes) for plan in (in_pieces, whole)]
    line = "the largest operations in {} pieces: peak {}, without pieces {}"
    line = line.format(split.pieces, *peaks)
    assert any(line in message for message in caplog.messages)


@pytest.mark.slow
def test_gradients_in_pieces_are_those_of_the_whole_graph() -> None:
    compiled_as_without(language_model(), "min", 1e-5, inductor=False, time_limit=4.0)


@pytest.mark.slow
@needs_compiler
def test_inductors_kernels_for_the_smallest_budget() -> None:
    """Verified peaks, in no more time than the limit and two of plain torch.compile's steps."""
    case, state = with_state(language_model())
    started_s = time.perf_counter()
    two_steps(case, state)
    plain_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    (smallest,) = plans_of(case, "min")
    elapsed_s = time.perf_counter() - started_s
    assert elapsed_s <= 2 * plain_s + TIME_LIMIT_S
    (limited,) = plans_of(case, "70%")
    assert smallest.verified_bytes is not None
    assert limited.verified_bytes is not None
    assert smallest.verified_bytes <= limited.verified_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_is_below_every_feasible_one(name: str) -> None:
    """Without Inductor, with operations in pieces where a percentage needs them."""
    case = MODELS[name]()
    smallest = plan_of(case, "min")
    assert smallest is not None
    for percent in PERCENTAGES:
        plan = plan_of(case, f"{percent}%")
        if plan is None:
            break
        assert smallest.plan.peak_bytes <= plan.plan.peak_bytes, f"{percent}%"
