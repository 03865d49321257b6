"""Steps of training loops under torch.compile(backend="remat"): several calls before one backward,
models in eval mode, and state that changes inside of a step and between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.helpers.training.compiled_steps import EAGER
from torch import nn

import remat

pytestmark = pytest.mark.usefixtures("empty_compile_caches")

OPTIONS = {"budget": "70%", "inductor": False, "time_limit": 2.0, "split": "off"}


class Stateful(nn.Module):
    """A model with a buffer, a counter, and attributes that training loops change."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        widths = [(16, 64), (64, 16)] * 2
        self.layers = nn.ModuleList(nn.Linear(*width) for width in widths)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.is_counting, self.calls, self.scale = False, 0, 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_counting:  # Dynamo compiles each count, up to its limit of recompilations
            self.calls += 1
        self.seen += x.shape[0]
        for layer in self.layers:
            x = layer(x).sin()
        x = self.dropout(self.norm(x)) * self.scale
        return x.square().mean(), self.head(x)


Train = Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]
Change = Callable[[Stateful, int], object]


def one_call(run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    loss, logits = run(x)
    return loss + logits.mean()


def three_calls(run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return (run(x)[1] * run(2 * x)[1] + run(3 * x)[1]).mean()


def call_on_output(run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return run(x + run(x)[0])[1].mean()


def unused_head(run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return run(x)[0]


CASES: dict[str, tuple[Train, Change]] = {
    "one call": (one_call, lambda model, step: None),
    "three calls before one backward": (three_calls, lambda model, step: None),
    "a call on the output of another": (call_on_output, lambda model, step: None),
    "an unused head": (unused_head, lambda model, step: None),
    "a counter": (one_call, lambda model, step: setattr(model, "is_counting", True)),
    "eval mode": (one_call, lambda model, step: model.eval()),
    "eval mode in the second step": (one_call, lambda model, step: model.train(step != 1)),
    "a batch norm in eval mode": (one_call, lambda model, step: model.norm.eval()),
    "a scale that changes": (one_call, lambda model, step: setattr(model, "scale", 1.0 + step)),
    "a dropout that changes": (
        one_call,
        lambda model, step: setattr(model.dropout, "p", 0.2 * step),
    ),
    "a parameter that is frozen": (
        one_call,
        lambda model, step: model.head.requires_grad_(step != 1),
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name == "three calls before one backward" else pytest.mark.slow
        )
        for name in CASES
    ],
)
def test_steps_are_those_of_the_same_graph_without_a_plan(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients, present or None, buffers and Python state after each of three steps."""
    train, change = CASES[name]
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(512, 16)
    planned = copy.deepcopy(model)
    before = len(remat.compiled_plans())
    runs = [
        (model, torch.compile(model, backend=EAGER)),
        (planned, torch.compile(planned, backend="remat", options=OPTIONS)),
    ]
    for step in range(3):
        for trained, run in runs:
            change(trained, step)
            trained.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            train(run, x).backward()
        for (key, wanted), actual in zip(
            model.named_parameters(), planned.parameters(), strict=True
        ):
            assert (actual.grad is None) == (wanted.grad is None), key
            torch.testing.assert_close(actual.grad, wanted.grad)
        torch.testing.assert_close(dict(planned.named_buffers()), dict(model.named_buffers()))
        assert planned.calls == model.calls
    plans = remat.compiled_plans()[before:]
    assert plans
    assert all(p.plan.peak_bytes <= 0.7 * p.baseline_bytes for p in plans)
    warnings = [r for r in caplog.records if "called again before the backward" in r.message]
    # The call on the output of another has a graph of its own: its input requires a gradient.
    assert bool(warnings) == (train is three_calls)
