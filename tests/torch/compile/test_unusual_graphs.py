"""Unusual graphs that plain torch.compile accepts: operations that run once, that must not
change places, that return no tensor, and second compilations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.memory.meter import allocated_peak

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("empty_compile_caches"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BOTH = pytest.mark.parametrize("inductor", [pytest.param(True, marks=pytest.mark.slow), False])


def options(budget: str = "100%", **more: object) -> dict[str, Any]:
    return {"backend": "remat", "options": {"budget": budget, "split": "off", **more}}


def planned(before: int) -> list[CompiledPlan]:
    return remat.compiled_plans()[before:]


@pytest.mark.slow
def test_random_operations_without_a_seed_run_once() -> None:
    """Eager mode's own dropout, under Inductor: output and mask come from one sample."""

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5) * 2

    x = torch.rand(256, 64).add_(0.1).requires_grad_()
    output = torch.compile(dropped, **options("300%", fallback_random=True))(x)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(output != 0, x.grad != 0)
    assert 0.4 < (output != 0).double().mean() < 0.6


@pytest.mark.slow
def test_eager_random_operations_sample_once_within_the_budget() -> None:
    """torch also leaves those in the backward whose inputs are available there: they take memory,
    and random numbers that belong to the next step."""
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16)),) * 3
    model, x = nn.Sequential(*parts), torch.randn(256, 16)
    fast = torch.compile(model, **options(fallback_random=True))

    def step(run: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        run(x).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return gradients, torch.get_rng_state()

    expected, state = step(model)
    before = len(remat.compiled_plans())
    actual, own_state = step(fast)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(own_state, state)
    (compiled,) = planned(before)
    assert compiled.verified_bytes is not None
    assert compiled.budget_bytes is not None
    constant_bytes = sum(t.nbytes for t in (x, *model.parameters()))
    assert allocated_peak(lambda: step(fast)) + constant_bytes <= compiled.budget_bytes


@pytest.mark.slow
def test_bfloat16_products_have_a_workspace() -> None:
    """On CPUs, in torch's allocator: eager mode accumulates in float32."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model, x = nn.Sequential(*parts).bfloat16(), torch.randn(128, 32, dtype=torch.bfloat16)
    fast = torch.compile(lambda x: model(x).float().square().mean(), **options("min"))
    before = len(remat.compiled_plans())

    def step() -> None:
        model.zero_grad(set_to_none=True)
        fast(x).backward()

    step()
    (compiled,) = planned(before)
    model.zero_grad(set_to_none=True)
    peak_bytes = allocated_peak(step) + sum(t.nbytes for t in (x, *model.parameters()))
    assert compiled.verified_bytes is not None
    assert peak_bytes <= compiled.verified_bytes


class Averaging(nn.Module):
    """A module that reads a buffer, then writes an expensive intermediate into it: a plan for
    "min" would run that first."""

    average: torch.Tensor
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(512))
        self.register_buffer("weight", torch.randn(512, 512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.average
        average = (x.detach() @ self.weight).mean(0)
        self.average.copy_(average)
        return y, average


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"strategy": remat.Auto(order="on")},
        pytest.param({"inductor": False}, marks=pytest.mark.slow),
    ],
)
def test_buffers_are_not_mutated_before_their_last_read(more: dict[str, Any]) -> None:
    model, x = Averaging(), torch.randn(1024, 512, requires_grad=True)
    y, average = torch.compile(model, **options("min", **more))(x)
    assert torch.equal(y, x)
    assert torch.equal(model.average, average)


class Asserting(WithParts, layer=(8, 8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "must be positive")  # what dynamo makes of an `assert`
        return self.layer(x).tanh().sum()


@BOTH
def test_assertions_stay_in_the_graph(inductor: bool) -> None:
    run = torch.compile(Asserting(), **options(inductor=inductor))
    run(torch.ones(4, 8)).backward()
    with pytest.raises(RuntimeError, match="must be positive"):
        run(-torch.ones(4, 8))


class Inverting(WithParts, layer=(8, 8)):
    """A module whose check of a result is ordered by a token of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return torch.linalg.inv(h.mT @ h + torch.eye(8)).tanh().sum()


@BOTH
def test_effect_tokens_are_passed_through(inductor: bool) -> None:
    torch.manual_seed(0)
    model, x = Inverting(), torch.randn(32, 8)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.compile(model, **options(inductor=inductor))(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


class Reshaping(WithParts, layer=(4, 4)):
    """A module that passes a size over a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0] * 4
        h = self.layer(x).tanh()
        torch._dynamo.graph_break()
        return h.reshape(size).square().mean()


@BOTH
def test_sizes_may_be_outputs(inductor: bool) -> None:
    torch.manual_seed(0)
    model, x = Reshaping(), torch.randn(6, 4)
    run = torch.compile(model, dynamic=True, **options(inductor=inductor))
    torch.testing.assert_close(run(x), model(x))
    run(x).backward()
    before = len(remat.compiled_plans())
    torch.testing.assert_close(run(x[:5]), model(x[:5]))
    assert not planned(before)


class Two(nn.Module):
    """Two stacks, with different sizes."""

    def __init__(self, width: int, depth: int, breaks: bool) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))
            for _ in range(2)
        )
        self.breaks = breaks

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(y).square().mean() + h.square().mean()


@pytest.mark.slow
def test_bounds_that_the_user_sets_on_sizes_are_kept() -> None:
    """Unbounded sizes are planned for a smaller maximum, where the budget requires it."""
    at_call, at_twice = 2_000, 4_096
    largest = {}
    for rows in (at_call, at_twice):
        torch._dynamo.reset()
        x, y = torch.randn(64, 8), torch.randn(rows, 8)
        smallest = options("min", inductor=False)
        torch.compile(Two(8, 2, False), dynamic=False, **smallest)(x, y)
        largest[rows] = remat.compiled_plans()[-1].plan.peak_bytes
    budget = (largest[at_call] + largest[at_twice]) // 2
    torch._dynamo.reset()
    x, y = torch.randn(20, 8), torch.randn(at_call, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    torch._dynamo.mark_dynamic(y, 0)
    run = torch.compile(Two(8, 2, False), **options(str(budget), inductor=False))
    run(x, y).backward()
    before = len(remat.compiled_plans())
    run(torch.randn(50, 8), y).backward()
    assert not planned(before)


@pytest.mark.slow
def test_a_recompiled_later_graph_leaves_memory_for_the_earlier_ones() -> None:
    run = torch.compile(Two(64, 4, True), dynamic=False, **options(str(4 << 20), inductor=False))
    x = torch.randn(512, 64)
    before = len(remat.compiled_plans())
    for rows in (512, 1024):
        run(x, torch.randn(rows, 64)).backward()
    first, *later = planned(before)
    assert len(later) == 2
    for plan in later:
        assert plan.external_bytes >= first.saved_bytes > 0
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # with a budget of its own
    torch.compile(other, **options("300%", inductor=False))(torch.randn(4, 8)).sum().backward()
    run(x, torch.randn(256, 64)).backward()
    assert planned(before)[-1].external_bytes >= first.saved_bytes
