"""Models made of blocks, and steps of them to compare."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.helpers.training import steps
from tests.helpers.training.steps import Step
from tests.helpers.training.steps import assert_same as assert_same
from tests.helpers.training.steps import loss_of as loss_of
from tests.helpers.training.steps import peak_of as peak_of
from torch import nn

import remat
from remat.blockwise.blocks_plan import BlocksPlan


class Output(NamedTuple):
    """The loss and logits of `Net`."""

    loss: torch.Tensor
    logits: torch.Tensor


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        assert not self.gradient_checkpointing
        output = F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)
        return x + output if scale is None else x + output * scale


class Experts(nn.Module):
    """Mixture of experts: each row goes to the expert of its index, which no capture can trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number in range(len(self.weights)):
            rows = (to == number).nonzero()[:, 0]
            output = output.index_add(0, rows, F.silu(x[rows] @ self.weights[number]))
        return output


class Routed(nn.Module):
    """A block followed by `Experts`, with indices computed from its output."""

    def __init__(self, width: int, experts: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.before, self.experts = Block(width), experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.experts(x, x.detach().abs().sum(-1).long() % 3)


class Net(nn.Module):
    """An embedding, the blocks and a head, with the loss: there are operations outside of the
    blocks."""

    def __init__(self, blocks: list[nn.Module], width: int = 32, classes: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor) -> Output:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return Output(F.cross_entropy(logits, ids), logits)


def net(**settings: Any) -> tuple[Net, torch.Tensor]:
    """Return a `Net` of four blocks, and token ids for it."""
    torch.manual_seed(0)
    return Net([Block(32) for _ in range(4)], **settings), torch.randint(0, 50, (256,))


def step(model: nn.Module, batch: torch.Tensor, seed: int) -> Step:
    """Run one step; no gradients stay in memory."""
    result = steps.step(model, batch, seed=seed)
    model.zero_grad(set_to_none=True)
    return result


NEAR = remat.Auto(gap=0.05, time_limit=5.0)


def enabled(model: nn.Module, budget: int | str, scope: str = "blocks", **more: Any) -> Any:
    """Enable a model whose plan may drop outputs, with costs measured on the CPU; near the
    optimum, and without pieces."""
    options = {"outputs": "dropped", "costs": "cpu", "split": "off", "strategy": NEAR}
    return remat.enable(model, budget, scope=scope, **(options | more))


def plan_of(model: nn.Module) -> BlocksPlan:
    """Return the latest plan of an enabled model."""
    plan = remat.plans(model)[-1]
    assert isinstance(plan, BlocksPlan)
    return plan
