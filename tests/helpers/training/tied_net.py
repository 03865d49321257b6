"""A small language model with tied weights, dropout and a buffer, to enable."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.training.steps import step
from torch import nn


class Net(nn.Module):
    """A model with tied input and output weights, dropout and a buffer that counts."""

    steps: torch.Tensor

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 97, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.steps += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1, self.training)
        return scale * nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net() -> Net:
    """Return the model with fixed random weights."""
    torch.manual_seed(0)
    return Net()


def batch(length: int = 128) -> torch.Tensor:
    """Return fixed token ids."""
    return torch.randint(0, 97, (8, length), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, *args: Any, seed: int = 3, **kwargs: Any) -> list[torch.Tensor]:
    """Run one step; return the gradients."""
    return [*step(model, *(args or (batch(),)), seed=seed, **kwargs).gradients.values()]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Check that gradients are equal bit for bit."""
    assert len(actual) == len(expected) > 0
    assert all(map(torch.equal, actual, expected))
