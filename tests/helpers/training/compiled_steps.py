"""Steps of models under torch.compile, with their gradients, plans and peaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from tests.helpers.training import steps
from tests.helpers.training.models import Case
from tests.helpers.training.steps import Step
from tests.helpers.training.steps import step_of as step
from torch import nn

import remat
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.memory.meter import allocated_peak

EAGER = "aot_eager_decomp_partition"
"""The backend on whose graph `inductor=False` plans: torch's partitioner and Inductor's
decompositions, run as they are."""


def two_steps(case: Case, state: dict[str, Any], **options: Any) -> list[Step]:
    """Run two steps of the compiled model, from the given weights and buffers."""
    torch._dynamo.reset()
    case.model.load_state_dict(state)
    run = torch.compile(case.model, **options)
    return [step(case, run, seed) for seed in (1, 2)]


def with_state(case: Case) -> tuple[Case, dict[str, Any]]:
    """Return the case with a copy of its initial weights and buffers."""
    return case, copy.deepcopy(case.model.train().state_dict())


def assert_same(actual_steps: list[Step], wanted: list[Step], tolerance: float) -> None:
    """Check that losses, gradients and buffers agree within a relative tolerance."""
    for actual, expected in zip(actual_steps, wanted, strict=True):
        steps.assert_same(actual, expected, tolerance)


def compiled(
    case: Case, budget: int | str, seeds: Sequence[int] = (1,), **options: Any
) -> tuple[Callable[..., Any], list[CompiledPlan], list[Step]]:
    """Compile a model within a budget and run a step for each seed. Return the compiled model, the
    plans of its graphs, and the steps."""
    before = len(remat.compiled_plans())
    torch._dynamo.reset()
    run = remat.compile(case.model, budget, **options)
    actual = [step(case, run, seed) for seed in seeds]
    return run, remat.compiled_plans()[before:], actual


def plans_of(case: Case, budget: int | str, **options: Any) -> list[CompiledPlan]:
    """Return the plans of one compiled step."""
    return compiled(case, budget, **options)[1]


def compiled_as_without(
    case: Case, budget: int | str, tolerance: float, **options: Any
) -> tuple[Callable[..., Any], list[CompiledPlan]]:
    """Compile a model within a budget, and check that two steps are those of torch.compile without
    a plan. Return the compiled model and the plans of its graphs."""
    case, state = with_state(case)
    is_eager = options.get("inductor") is False
    expected = two_steps(case, state, **({"backend": EAGER} if is_eager else {}))
    case.model.load_state_dict(state)
    run, plans, actual = compiled(case, budget, (1, 2), **options)
    assert_same(actual, expected, tolerance)
    return run, plans


class Blocks(nn.Module):
    """Attention-free blocks with dropout, a norm and residuals; an embedding and a loss."""

    def __init__(self, depth: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), 0.1, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Convolutions(nn.Module):
    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU()
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks() -> Case:
    """Return a case of `Blocks`."""
    torch.manual_seed(0)
    return Case(Blocks(), (torch.randint(0, 50, (8, 128)),), loss=lambda out: out)


def convolutions() -> Case:
    """Return a case of `Convolutions`."""
    torch.manual_seed(0)
    return Case(Convolutions(), (torch.randn(4, 3, 48, 48),), loss=lambda out: out)


def dropout_case() -> Case:
    torch.manual_seed(0)
    made_of = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return Case(nn.Sequential(*made_of), (torch.randn(512, 64),), loss=lambda out: out.sum())


def measured_peak(case: Case, run: Any) -> int:
    """Return the peak in bytes of a warm step by the allocator, with parameters, buffers and
    batch."""
    step(case, run)
    case.model.zero_grad(set_to_none=True)
    peak = allocated_peak(lambda: case.loss(run(*case.args, **case.kwargs)).backward())
    resident = (*case.model.parameters(), *case.model.buffers(), *case.args, *case.kwargs.values())
    return peak + sum(t.nbytes for t in resident if isinstance(t, torch.Tensor))
