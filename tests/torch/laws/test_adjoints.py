"""Autograd functions whose backward runs a submodule again and differentiates it: adjoint methods
of differential equations, and reversible layers. Gradients are eager mode's bit for bit, or an
error names the cause and the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.training.doors import planned
from tests.helpers.training.steps import assert_same_gradients
from torch import nn

import remat

WIDTH, STEPS = 16, 3


class Adjoint(torch.autograd.Function):
    """Explicit Euler steps; the backward integrates the state and its adjoint back in time."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.field = field
        with torch.no_grad():
            for _ in range(STEPS):
                x = x + field(x) / STEPS
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        adjoint, gradients = tangents[0], [torch.zeros_like(p) for p in parameters]
        for _ in range(STEPS):
            with torch.enable_grad():
                state = x.detach().requires_grad_()
                change = ctx.field(state)
                first, *others = torch.autograd.grad(change, (state, *parameters), adjoint / STEPS)
            x = x - change.detach() / STEPS
            adjoint = adjoint + first
            gradients = [g + other for g, other in zip(gradients, others, strict=True)]
        return None, adjoint, *gradients


class CallsBackward(torch.autograd.Function):
    """The backward accumulates into the parameters' gradients itself."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: torch.Tensor) -> Any:
        ctx.field = field
        ctx.save_for_backward(x)
        with torch.no_grad():
            return field(x)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            state = x.detach().requires_grad_()
            torch.autograd.backward(ctx.field(state), tangents[0])
        return None, state.grad


class Block(nn.Module):
    def __init__(self, *, calls_backward: bool) -> None:
        super().__init__()
        self.calls_backward = calls_backward
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.field = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(x)))
        if self.calls_backward:
            return CallsBackward.apply(self.field, x)
        return Adjoint.apply(self.field, x, *self.field.parameters())


def network(*, calls_backward: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(calls_backward=calls_backward) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def assert_equal_gradients(model: nn.Module, run: Any, eager: nn.Module) -> None:
    """Check the gradients of three steps, of which the last one accumulates."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        for module, forward in ((model, run), (eager, eager)):
            if number < 2:
                module.zero_grad(set_to_none=True)
            forward(x).square().mean().backward()
        assert_same_gradients(model, eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    "door",
    ["optimize", *(pytest.param(d, marks=pytest.mark.slow) for d in ("model", "blocks", "auto"))],
)
@pytest.mark.parametrize("budget", ["min", pytest.param("100%", marks=pytest.mark.slow)])
def test_adjoint_methods_have_the_gradients_of_eager_mode(door: str, budget: str) -> None:
    model = network(calls_backward=False)
    eager = copy.deepcopy(model)
    assert_equal_gradients(model, planned(model, door, budget), eager)


@pytest.mark.parametrize("door", ["blocks", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", ["min", pytest.param("100%", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_blocks_that_call_backward_in_their_backward_are_run_as_they_are(
    door: str, budget: str
) -> None:
    model = network(calls_backward=True)
    eager = copy.deepcopy(model)
    assert_equal_gradients(model, planned(model, door, budget), eager)


@pytest.mark.parametrize("door", ["optimize", "model"])
def test_a_model_that_calls_backward_in_its_backward_is_refused(door: str) -> None:
    model = network(calls_backward=True)
    run = planned(model, door, "100%")
    with pytest.raises(remat.TraceError, match=r"calls backward\(\) in its backward.*Remedy"):
        run(torch.randn(64, WIDTH))
    assert all(p.grad is None for p in model.parameters())
