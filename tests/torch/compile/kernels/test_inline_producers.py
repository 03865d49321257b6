"""Producers that kernels recompute instead of reading them; and parts of concatenations as
separate buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    compiled_as_without,
    measured_peak,
    plans_of,
)
from tests.helpers.training.recorded_steps import Case
from torch import nn

pytestmark = [needs_compiler, pytest.mark.usefixtures("empty_compile_caches")]


class Experts(nn.Module):
    """Each token's experts as a copy of their weights, as in Transformers' "batched_mm"."""

    def __init__(self, experts: int = 4, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(experts, width, width) / 7) for _ in range(layers)]
        self.weights = nn.ParameterList(weights)
        self.register_buffer("of", torch.arange(64) % experts)
        self.of: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.bmm(weight[self.of], torch.tanh(x).unsqueeze(-1)).squeeze(-1)
        return x.square().mean()


class Normed(nn.Module):
    """Convolution, batch norm, ReLU: reductions of its backward read what another kernel reads,
    too."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width if n else 3, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
            for n in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Joined(nn.Module):
    """Parts of a concatenation that another operation reads, much later."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(4 * width, 4 * width)
        self.third = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = torch.tanh(self.first(x))
        others = [torch.sigmoid(part), torch.cos(part), torch.sin(part)]
        joined_parts = torch.cat([part, *others], dim=-1)
        return (self.third(torch.tanh(self.second(joined_parts))) * part).square().mean()


def experts() -> Case:
    torch.manual_seed(0)
    return Case(Experts(), (torch.randn(64, 48),), loss=lambda out: out)


def normed() -> Case:
    torch.manual_seed(0)
    return Case(Normed(), (torch.randn(4, 3, 40, 40),), loss=lambda out: out)


def joined() -> Case:
    torch.manual_seed(0)
    return Case(Joined(), (torch.randn(512, 32),), loss=lambda out: out)


since_2_13 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.11 clones a gradient inside of convolution_backward, which is verified, but "
    "not planned here",
)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(experts, marks=pytest.mark.slow),
        pytest.param(normed, marks=[pytest.mark.slow, since_2_13]),
        pytest.param(joined, marks=pytest.mark.slow),
    ],
)
def test_the_planned_peak_is_the_measured_one(make: Callable[[], Case]) -> None:
    """At the smallest peak, where every difference shows; gradients are unchanged."""
    case = make()
    # Batch norms whose scale the next one cancels have gradients that are mostly rounding error.
    tolerance = 1e-4 if make is normed else 1e-5
    run, (compiled,) = compiled_as_without(case, "min", tolerance, time_limit=5.0)
    assert compiled.verified_bytes is not None
    assert compiled.verified_bytes == pytest.approx(compiled.plan.peak_bytes, rel=0.005)
    assert measured_peak(case, run) == pytest.approx(compiled.verified_bytes, rel=0.01)


@pytest.mark.slow
def test_gathered_weights_are_never_written_to_memory() -> None:
    """On CPUs, where Inductor generates kernels for matrix-vector products. They cost no time
    either."""
    gathered_bytes = 64 * 48 * 48 * 4
    (compiled,) = plans_of(experts(), "100%")
    assert compiled.baseline_bytes > gathered_bytes
    graph = compiled.plan.graph
    written_values = [
        v for operation in graph.operations if not operation.backward for v in operation.outputs
    ]
    assert written_values
    assert all(graph.values[v].size_bytes < gathered_bytes for v in written_values)
    assert compiled.verified_bytes is not None
    assert compiled.verified_bytes <= compiled.baseline_bytes
    assert compiled.plan.schedule.runs == tuple(range(len(compiled.plan.graph)))


@pytest.mark.slow
def test_inputs_of_a_reduction_are_inlined() -> None:
    """Batch norm sums the masked gradient of a ReLU and reads it once more: no kernel of the
    backward holds an activation, a gradient and a third tensor of that size."""
    (compiled,) = plans_of(normed(), "100%")
    graph = compiled.plan.graph
    activation_bytes = 4 * 8 * 40 * 40 * 4
    large = {n for n, value in enumerate(graph.values) if value.size_bytes == activation_bytes}
    sums = [
        operation
        for operation in graph.operations
        if operation.backward
        and len(operation.outputs) == 3  # two sums, and one of them scaled
        and not large.intersection(operation.outputs)
    ]
    assert len(sums) == 3
    # The first one computes its incoming gradient, that of the output, in the same kernel.
    assert [len(large.intersection(operation.inputs)) for operation in sums] == [1, 2, 2]


@pytest.mark.slow
def test_the_last_convolution_has_the_layout_that_inductor_chooses() -> None:
    """Passing its result on unchanged would give another layout, after a copy."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        for a, b, s in ((3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1))
    ]
    images = torch.randn(4, 3, 48, 48)
    case = Case(nn.Sequential(*layers), (images,), loss=lambda out: out.mean((2, 3)).square().sum())
    strides: list[tuple[int, ...]] = []

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (4, 32, 24, 24) and tensor.dtype == torch.float32:
            strides.append(tensor.stride())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        compiled_as_without(case, "80%", 1e-5)
    assert strides
    assert set(strides) == {(32 * 24 * 24, 1, 32 * 24, 32)}
