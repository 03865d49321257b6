"""Random modules and random schedules for the laws of `tests/torch/laws`.

A module is a list of steps over values of one shape, (ROWS, WIDTH), so that any step can follow
any other and any earlier value can be read by a later step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from remat.graph import Graph
from remat.schedule import Schedule

ROWS, WIDTH = 48, 16

Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """One step: its kind, and how far back (0 is the latest) its second operand is."""

    kind: str
    back: int


def _slices(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, ::2].mul_(2.0)
    x[1:5] += y[:4]
    return x


def _attend(x: Tensor, y: Tensor) -> Tensor:
    q, k = x.view(ROWS, 4, 4).transpose(0, 1), y.view(ROWS, 4, 4).transpose(0, 1)
    attended = F.scaled_dot_product_attention(q, k, q, dropout_p=0.1)
    return attended.transpose(0, 1).reshape(ROWS, WIDTH)


def _swap(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.split(WIDTH // 2, dim=1)
    return torch.cat([b, torch.tanh(a)], dim=1)


FREE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu_": lambda x, y: F.relu(x, inplace=True),
    "tanh": lambda x, y: torch.tanh(x),
    "gelu": lambda x, y: F.gelu(x),
    "dropout": lambda x, y: F.dropout(x, 0.3),
    "dropout_": lambda x, y: F.dropout(x, 0.3, inplace=True),
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "mul": lambda x, y: x * torch.sigmoid(y),
    "mul_": lambda x, y: x.mul_(0.7),
    "softmax": lambda x, y: torch.softmax(x, dim=-1),
    "split": _swap,
    "transpose": lambda x, y: (x.t() @ y.softmax(0)).repeat(3, 1),
    "expand": lambda x, y: x.mean(dim=1, keepdim=True).expand_as(y) + y,
    "slices": _slices,
    "attention": _attend,
    "detached": lambda x, y: x * y.detach().abs().amax(),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "stack": lambda x, y: torch.stack([x, y], dim=1).amax(dim=1),
}
"""Steps without parameters: they take the latest value and an earlier one, and return a value."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tied": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.Flatten()
    ),
}
"""Steps with parameters. All "tied" steps of a module share one weight."""

KINDS = (*LAYERS, *FREE)


class RandomModule(nn.Module):
    """A module that runs the steps; the loss is the mean square of the last value and of one
    other."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict(
            {str(i): LAYERS[s.kind]() for i, s in enumerate(steps) if s.kind in LAYERS}
        )
        tied = [self.layers[str(i)] for i, s in enumerate(steps) if s.kind == "tied"]
        for layer in tied[1:]:
            layer.weight = tied[0].weight

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.first(x)]
        for i, step in enumerate(self.steps):
            x, y = values[-1], values[-1 - min(step.back, len(values) - 1)]
            if step.kind in LAYERS:
                values.append(self.layers[str(i)](x))
            else:
                values.append(FREE[step.kind](x, y))
        return values[-1].square().mean() + 0.1 * values[len(values) // 2].mean()


def random_schedule(graph: Graph, rng: random.Random, rate: float, depth: int = 6) -> Schedule:
    """Return every operation in the graph's order; before any of them its inputs, and up to
    `depth` generations of their inputs, are recomputed with probability `rate`."""
    runs: list[int] = []
    may = [operation.recomputable for operation in graph.operations]

    def add_recomputation(op: int, depth_left: int) -> None:
        for value in graph.operations[op].inputs:
            producer = graph.producer[value]
            if may[producer] and depth_left and rng.random() < rate:
                add_recomputation(producer, depth_left - 1)
                runs.append(producer)

    for op in range(len(graph)):
        add_recomputation(op, depth)
        runs.append(op)
    return Schedule(tuple(runs))


def lean_schedule(graph: Graph, rng: random.Random, retained_share: float) -> Schedule:
    """Return a schedule that retains a random share of the forward's values.

    Before each backward operation, it recomputes what that needs of the others from the retained
    ones. Most of that then stays retained.
    """
    assert graph.boundary is not None
    runs = list(range(graph.boundary + 1))
    retained_values = {
        value
        for op in range(graph.boundary + 1)
        for value in graph.operations[op].outputs
        if not graph.operations[op].recomputable or rng.random() < retained_share
    }

    def need(op: int, recomputed: set[int]) -> None:
        for value in graph.operations[op].inputs:
            if value not in retained_values and value not in recomputed:
                producer = graph.producer[value]
                need(producer, recomputed)
                recomputed.update(graph.operations[producer].outputs)
                runs.append(producer)

    for op in range(graph.boundary + 1, len(graph)):
        recomputed: set[int] = set()
        need(op, recomputed)
        runs.append(op)
        retained_values.update(graph.operations[op].outputs)
        retained_values.update(value for value in recomputed if rng.random() < 0.7)
    return Schedule(tuple(runs))
