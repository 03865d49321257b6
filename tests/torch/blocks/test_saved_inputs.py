"""The inputs that planned blocks save: each counts once, and until its last read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.block_models import (
    Block,
    Output,
    assert_same,
    enabled,
    peak_of,
    plan_of,
    step,
)
from torch import nn

WIDTH = 16


class MaskedBlock(nn.Module):
    """A block that saves its mask only if it recomputes the inverted one. Its largest tensors come
    after its input was read: the norm is computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        hidden = F.gelu(self.up(wide.to(x.dtype))).masked_fill(~mask, 0.0)
        return x + self.down(hidden.tanh())


class MaskedNet(nn.Module):
    """Blocks with one mask, which the model computes and does not keep."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: torch.Tensor) -> Output:
        mask = (ids[:, None] + torch.arange(16 * WIDTH)) % 3 == 0
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        del mask
        logits = self.head(x)
        return Output(F.cross_entropy(logits.float(), ids), logits)


def test_a_mask_of_all_blocks_counts_once() -> None:
    torch.manual_seed(0)
    model, ids = MaskedNet(depth=8).bfloat16(), torch.randint(0, 50, (512,))
    expected = step(model, ids, seed=1)
    enabled(model, "min")
    assert_same(step(model, ids, seed=1), expected)
    plan, measured_bytes = plan_of(model), peak_of(model, ids)
    assert {call.how for call in plan.calls} == {"planned"}
    assert 0.99 * plan.peak_bytes <= measured_bytes <= plan.peak_bytes <= plan.budget_bytes


class LateNet(nn.Module):
    """Code outside of blocks saves the input of the first block, and its backward runs before that
    of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Output:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x + first.sin())
        return Output(F.cross_entropy(logits, ids), logits)


def test_an_input_that_outside_code_releases_before_the_block_counts() -> None:
    torch.manual_seed(0)
    model, ids = LateNet(), torch.randint(0, 50, (1024,))
    enabled(model, "min")
    step(model, ids, seed=1)
    plan, measured_bytes = plan_of(model), peak_of(model, ids)
    assert 0.99 * plan.peak_bytes <= measured_bytes <= plan.peak_bytes


class PassingBlock(nn.Module):
    """A block that returns one of its inputs, too. A planned block returns a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return self.block(x) * scale, scale


class PassingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.head = (
            nn.Embedding(50, 64),
            nn.Embedding(50, 64),
            nn.Linear(64, 50),
        )
        self.blocks = nn.ModuleList(PassingBlock() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Output:
        x, scale = self.embed(ids), self.scale(ids)
        for block in self.blocks:
            x, scale = block(x, scale)
        logits = self.head(x)
        return Output(F.cross_entropy(logits, ids), logits)


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_an_input_that_a_block_returns_counts_as_a_copy(budget: str) -> None:
    torch.manual_seed(0)
    model, ids = PassingNet(), torch.randint(0, 50, (2048,))
    enabled(model, budget)
    step(model, ids, seed=1)
    plan, measured_bytes = plan_of(model), peak_of(model, ids)
    assert 0.97 * plan.peak_bytes <= measured_bytes <= plan.peak_bytes
