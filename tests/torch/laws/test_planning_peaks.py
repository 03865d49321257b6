"""The law of planning's memory: the step in which a plan is made needs at most the budget, or what
checkpointing every block takes, whichever is larger.

A table of models, doors, sources of costs and budgets. The models need each way to plan: a capture
of the whole model, captures of blocks after a dry run, and profiles of blocks and of their child
modules in eager mode. Costs are measured or from a data sheet. The peak is that of live storages,
operations that are measured for their costs included.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.training.doors import latest_plan, planned
from torch import nn
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

import remat
from remat.frontend.costs import operation_costs
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes

WIDTH, BLOCKS = 32, 4
ROOM = 1.005
"""For the scales of quantized weights, which a dry run copies."""


class QuantizedProduct(torch.autograd.Function):
    """A product with a frozen weight in eight bits, which is unpacked in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return tangents[0] @ (weight.to(tangents[0].dtype) * scale), None, None


class QuantizedLinear(nn.Module):
    """A quantized base with an adapter of rank four, as in QLoRA."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.full((outputs, 1), 1e-3))
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return QuantizedProduct.apply(x, self.weight, self.scale) + self.up(self.down(x))


@dataclass(frozen=True)
class Shape:
    """The traits of a model that decide how it is planned, and its peak. `branches` is where the
    forward depends on data: in a "block" or the "model", between "parts" of a block, or nowhere."""

    branches: str = ""
    vocabulary: int = 16
    rows: int = 1024
    is_quantized: bool = False


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        linear = QuantizedLinear if shape.is_quantized else nn.Linear
        self.branches = shape.branches == "block"
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.branches and float(y.detach().abs().max()) > 1e6:
            y = 2 * y
        return x + self.down(nn.functional.gelu(self.up(y)))


class BlockOfParts(nn.Module):
    """Calls the items of its only child module, with a branch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(2)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.parts[0](x)
        if float(y.detach().abs().max()) > 1e6:
            y = 2 * y
        return y + self.parts[1](y)


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.branches, self.checkpoints = shape.branches == "model", False
        self.embedding = nn.Embedding(shape.vocabulary, WIDTH)
        has_parts = shape.branches == "parts"
        self.blocks = nn.ModuleList(
            BlockOfParts() if has_parts else Block(shape) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, shape.vocabulary, bias=False)
        if shape.is_quantized:
            frozen = [self.embedding, self.head, *(m.norm for m in self.blocks)]
            for module in frozen:
                module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        if self.branches and float(x.detach().abs().max()) > 1e6:
            x = 2 * x
        return nn.functional.cross_entropy(self.head(x), tokens)


SHAPES = {
    "chain": Shape(),
    "branch in blocks": Shape("block"),
    "branch in the model": Shape("model"),
    "branch between parts of blocks": Shape("parts"),
    "large head": Shape(vocabulary=4000, rows=128),
    "large head, branch in blocks": Shape("block", vocabulary=4000, rows=128),
    "quantized": Shape(is_quantized=True),
    "quantized, branch in blocks": Shape("block", is_quantized=True),
    "quantized, branch in the model": Shape("model", is_quantized=True),
    "frozen head": Shape(vocabulary=4000, rows=16, is_quantized=True),
    "frozen head, branch in blocks": Shape("block", 4000, 16, is_quantized=True),
    "frozen head, branch in the model": Shape("model", 4000, 16, is_quantized=True),
}


DOORS = ("optimize", "model", "blocks", "auto")
WHOLE_MODEL = {"optimize", "model"}

QUICK = {
    ("large head", "optimize", "measured", "60%"),
    ("quantized, branch in blocks", "blocks", "measured", "60%"),
}

CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow])
    for cell in product(SHAPES, DOORS, ("roofline", "measured"), ("min", "60%", "bytes"))
    if not (cell[1] in WHOLE_MODEL and SHAPES[cell[0]].branches)
]


def peak_bytes(
    model: Network, run: Callable[..., Any], tokens: torch.Tensor, *, accumulates: bool = False
) -> int:
    """Return the peak of one step, measured operations included."""
    if not accumulates:
        model.zero_grad(set_to_none=True)
    gc.collect()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    constants = [*model.parameters(), *model.buffers(), *gradients, tokens]
    meter = LiveStorageMeter(unique_bytes(constants))
    with operations_metered(meter), meter, suppress(remat.InfeasibleBudget):
        run(tokens).backward()
    return meter.peak_bytes


@contextmanager
def operations_metered(meter: LiveStorageMeter) -> Iterator[None]:
    """Let the meter see the operations that are measured: they run without any modes."""
    isolated = operation_costs.isolated_modes

    @contextmanager
    def isolated_with_meter(device: torch.device) -> Iterator[None]:
        with isolated(device):
            _push_mode(meter)
            try:
                yield
            finally:
                _pop_mode()

    operation_costs.isolated_modes = isolated_with_meter
    try:
        yield
    finally:
        operation_costs.isolated_modes = isolated


@pytest.mark.parametrize(("shape", "door", "costs", "budget"), CELLS)
def test_planning_needs_no_more_than_the_budget_or_checkpoints(
    shape: str, door: str, costs: str, budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    torch.manual_seed(0)
    model = Network(SHAPES[shape])
    tokens = torch.randint(0, 16, (SHAPES[shape].rows,))
    eager_bytes = peak_bytes(model, model, tokens)
    model.checkpoints = True
    checkpointed_bytes = peak_bytes(model, model, tokens)
    model.checkpoints = False
    model.zero_grad(set_to_none=True)
    requested = (checkpointed_bytes + eager_bytes) // 2 if budget == "bytes" else budget
    options = {"strategy": remat.Auto(time_limit=1), "cache": False, "split": "auto"}
    options["costs"] = remat.Roofline("cpu") if costs == "roofline" else None
    run = planned(model, door, requested, **options)
    planning_bytes = peak_bytes(model, run, tokens)
    plan = latest_plan(run)
    planned_bytes = 0 if plan is None else max(plan.budget_bytes, plan.peak_bytes)
    limit_bytes = max(planned_bytes, checkpointed_bytes)
    assert checkpointed_bytes < eager_bytes
    assert planning_bytes <= ROOM * limit_bytes
    if plan is not None:
        assert peak_bytes(model, run, tokens) <= ROOM * limit_bytes
