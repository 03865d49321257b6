"""Steps of models that sample with many random operations, one after the other.

Each operation has a layer and reports the mean of its samples, so the first one whose samples
differ between two steps is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from tests.helpers.training.random_functions import DISTRIBUTIONS, FUNCTIONS, MODULES, RECURRENT
from tests.helpers.training.random_operators import CALLS, operator
from torch import Tensor, nn


class Step(NamedTuple):
    """The results of one step: the mean of each operation's samples, the loss, the gradients and
    the state of the generator afterwards."""

    means: list[float]
    loss: Tensor
    gradients: dict[str, Tensor]
    generator: Tensor


class RandomChain(nn.Module):
    """Random operations in a row, each on the activation of a layer. What they return is bounded by
    a sine: some distributions have no largest value."""

    def __init__(self, operations: Mapping[str, Callable[[Tensor], Any] | nn.Module]) -> None:
        super().__init__()
        self.names = list(operations)
        self.operations = list(operations.values())
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in self.names)
        self.parts = nn.ModuleList(o for o in self.operations if isinstance(o, nn.Module))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        means: list[Tensor] = []
        for layer, operation in zip(self.layers, self.operations, strict=True):
            h = torch.tanh(layer(x))
            samples = operation(h).float().sin()
            means.append(samples.mean())
            x = h + samples
        return x.square().sum(), means


def chain_of(*names: str) -> tuple[RandomChain, Tensor]:
    """Return a chain of operations of the tables, by name, and its input."""
    torch.manual_seed(0)
    model = RandomChain({name: _operation(name) for name in names})
    return model, torch.randn(16, 12)


def _operation(name: str) -> Callable[[Tensor], Any] | nn.Module:
    if name in CALLS:
        return partial(CALLS[name], operator(name))
    modules = MODULES | RECURRENT
    return modules[name]() if name in modules else (FUNCTIONS | DISTRIBUTIONS)[name]


def run_step(model: nn.Module, x: Tensor, run: Callable[[Tensor], Any] | None = None) -> Step:
    """Run one step of a chain, or of `run`: the same model compiled."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss, means = (model if run is None else run)(x)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step([m.item() for m in means], loss.detach(), gradients, torch.get_rng_state())


def difference(names: list[str], actual: Step, expected: Step, tolerance: float = 0.0) -> str:
    """Return what differs first between two steps of a chain of these names, or ""."""
    for name, mean, expected_mean in zip(names, actual.means, expected.means, strict=True):
        if not abs(mean - expected_mean) <= tolerance:
            return f"the samples of {name}: {mean} in place of {expected_mean}"
    if not torch.allclose(actual.loss, expected.loss, rtol=tolerance, atol=0):
        return f"the loss: {actual.loss} in place of {expected.loss}"
    if actual.gradients.keys() != expected.gradients.keys():
        return "the parameters that have a gradient"
    for name, gradient in expected.gradients.items():
        allowed = tolerance * max(1e-2, gradient.abs().max().item())
        if not (gradient - actual.gradients[name]).abs().max().item() <= allowed:
            return f"the gradient of {name}"
    if not torch.equal(actual.generator, expected.generator):
        return "the state of the generator"
    return ""
