"""Blocks that are valid in eager mode must behave the same where they are planned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import WithParts
from tests.helpers.training.steps import assert_same_steps
from torch import nn

import remat

COSTS = remat.Roofline("cpu")


class Chain(nn.Module):
    """Blocks in sequence; `inside_autocast` is whether the model itself enables autocast."""

    def __init__(self, *blocks: nn.Module, inside_autocast: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(blocks)
        self.inside_autocast = inside_autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside_autocast):
            for block in self.blocks:
                x = block(x)
        extra = sum(getattr(block, "extra", 0.0) for block in self.blocks)
        return x.float().square().mean() + extra


def enabled(model: nn.Module, budget: str = "100%") -> tuple[Any, nn.Module]:
    """Return the model with its blocks planned, and one that runs in eager mode."""
    other = copy.deepcopy(model)
    return remat.enable(model, budget, scope="blocks", costs=COSTS), other


class Residual(WithParts, norm=lambda: nn.LayerNorm(16), wide=(16, 64), narrow=(64, 16)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x)))).float()


class Measuring(WithParts, layer=(16, 16), head=(16, 1)):
    """A block with outputs that no loss reads: statistics, whose derivative may be infinite, and
    a head."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.layer(x).relu()
        return {"out": x + h, "norm": h.sqrt().mean(), "head": self.head(x)}


class Picking(WithParts, blocks=lambda: nn.ModuleList(Measuring() for _ in range(3))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)["out"]
        return x.square().mean()


class Auxiliary(nn.Module):
    """A block that leaves a part of the loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(16, 16), nn.Linear(16, 4)
        self.extra: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra = self.gate(x).square().mean()
        return x + self.layer(x).tanh()


_MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "autocast inside of the model": (
        lambda: Chain(*(Residual() for _ in range(3)), inside_autocast=True), True,
    ),
    "autocast disabled inside": (lambda: Chain(*(Residual() for _ in range(3))), True),
    "outputs that no loss reads": (Picking, True),
    "losses in attributes": (lambda: Chain(*(Auxiliary() for _ in range(3))), False),
}  # fmt: skip
"""Models, and True if a plan of blocks has all their blocks."""


@pytest.mark.slow_cases("autocast inside of the model")
@pytest.mark.parametrize("name", _MODELS)
def test_steps_are_eager_modes(name: str) -> None:
    make, is_planned = _MODELS[name]
    torch.manual_seed(0)
    model, other = enabled(make())
    autocast = torch.bfloat16 if name == "autocast disabled inside" else None
    assert_same_steps(model, other, torch.randn(64, 16), seeds=(1, 2), autocast=autocast)
    assert all((c.plan is not None) == is_planned for c in remat.plans(model)[0].calls)


class Remembering(WithParts, weight=lambda: nn.Parameter(torch.randn(32, 16) / 6)):
    """A block that no capture can trace: it is recomputed as a whole."""

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor) -> torch.Tensor:
        h = torch.cat([x, memory], -1) @ self.weight
        return x + (F.gelu(F.gelu(F.gelu(h))) if h.sum() < 1e9 else h)


class Writing(WithParts, blocks=lambda: nn.ModuleList(Remembering() for _ in range(4))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, memory=memory)
            memory.add_(x.detach())
        return x.square().mean()


def test_an_input_that_is_modified_later_is_not_read_by_a_recomputation() -> None:
    torch.manual_seed(0)
    model, _ = enabled(Writing(), "min")
    with pytest.raises(RuntimeError, match="Remembering was modified in place after its forward"):
        model(torch.randn(512, 16)).backward()


class Skipping(nn.Module):
    """A model that runs only some of its blocks, others in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.run = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.run:
            x = self.blocks[number](x)
        return x.square().mean()


@pytest.mark.slow
def test_blocks_that_the_first_step_skipped_are_checkpointed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, other = enabled(Skipping())
    x = torch.randn(256, 16)
    assert_same_steps(model, other, x, seeds=(1, 2))
    caplog.clear()
    for module in (model, other):
        module.run = [2, 3]
    with caplog.at_level(logging.INFO, "remat"):
        assert_same_steps(model, other, x, seeds=(1, 2))
    assert "blocks.2 is called differently" in caplog.text


class FrozenOrSkipped(nn.Module):
    """The blocks are frozen, or skipped by an argument or an attribute, in some steps."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        if not (skips or self.skips):
            for block in self.blocks:
                x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("steps", ["first", "every other", "later"])
@pytest.mark.parametrize("kind", ["frozen", "argument", "attribute"])
def test_steps_in_which_no_block_has_a_backward_run_without_a_plan(
    kind: str, steps: str, caplog: pytest.LogCaptureFixture
) -> None:
    without = {"first": [True, True], "later": [False, True, True]}
    torch.manual_seed(0)
    model = FrozenOrSkipped()
    model, other = enabled(model)
    x = torch.randn(16, 8)
    sequence = [*without.get(steps, [True, False, True]), False, False]
    with caplog.at_level(logging.INFO, logger="remat"):
        for is_without in sequence:
            for module in (model, other):
                if kind == "frozen":
                    module.blocks.requires_grad_(not is_without)
                elif kind == "attribute":
                    module.skips = is_without
            assert_same_steps(model, other, x, kind == "argument" and is_without)
    assert len(remat.plans(model)) == 1
    messages = [m for m in caplog.messages if "none of the 3 blocks has a backward" in m]
    assert messages or (kind, steps) == ("attribute", "later")  # runs the plan, of no blocks
    assert len(messages) <= 1 + (kind == "attribute")
