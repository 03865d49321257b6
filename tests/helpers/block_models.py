"""Models made of blocks, and steps of them to compare."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.frontend.memory.meter import measure_step

Gradients = dict[str, torch.Tensor]


class Output(NamedTuple):
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
        made = F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)
        return x + made if scale is None else x + made * scale


class Experts(nn.Module):
    """Each row goes to the expert that its numbers say: no capture sees that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for number in range(len(self.weights)):
            rows = (to == number).nonzero()[:, 0]
            made = made.index_add(0, rows, F.silu(x[rows] @ self.weights[number]))
        return made


class Routed(nn.Module):
    def __init__(self, width: int, experts: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.before, self.experts = Block(width), experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.experts(x, x.detach().abs().sum(-1).long() % 3)


class Net(nn.Module):
    """Something outside of the blocks, before and after them, and a loss."""

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
    torch.manual_seed(0)
    return Net([Block(32) for _ in range(4)], **settings), torch.randint(0, 50, (256,))


def loss_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def step(model: nn.Module, batch: torch.Tensor, seed: int) -> tuple[torch.Tensor, Gradients]:
    torch.manual_seed(seed)
    loss = loss_of(model(batch))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def assert_same(actual: Any, wanted: Any) -> None:
    assert torch.equal(actual[0], wanted[0])
    assert actual[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(actual[1][name], gradient), name


def peak_of(model: nn.Module, batch: torch.Tensor) -> int:
    def one() -> None:
        loss_of(model(batch)).backward()

    model.zero_grad(set_to_none=True)
    constants = [*model.parameters(), *model.buffers(), batch]
    peak_bytes = measure_step(one, constants).peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


def enabled(model: nn.Module, budget: int | str, scope: str = "blocks", **more: Any) -> Any:
    return remat.enable(model, budget, scope=scope, outputs="dropped", costs="cpu", **more)


def plan_of(model: nn.Module) -> remat.BlocksPlan:
    plan = remat.plans(model)[-1]
    assert isinstance(plan, remat.BlocksPlan)
    return plan
