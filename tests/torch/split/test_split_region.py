"""Splitting a region: pieces compute what the whole computed, for any operators, seed and count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from tests.helpers.training.models import WithParts
from tests.helpers.training.steps import Step, assert_same, step
from torch import Tensor, nn

import remat
from remat.documents.trace import Trace
from remat.passes.split.regions import Region, TraceIndex, find_region
from remat.passes.split.rewriting import split_regions
from remat.passes.split.stages import stages
from remat.passes.split.states import PartialSum, Rows, candidate_rows

BATCH, TOKENS, WIDTH, CLASSES = 3, 4, 6, 40
Batch = tuple[Tensor, ...]


class Model(nn.Module):
    """A chain of layers with a residual connection, and a loss."""

    def __init__(self, layers: list[nn.Module], loss: nn.Module) -> None:
        super().__init__()
        self.layers, self.loss = nn.ModuleList(layers), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(x, labels)


class Function(nn.Module):
    """A function of one tensor as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Gated(
    WithParts, up=(WIDTH, 32), gate=lambda: nn.Linear(WIDTH, 32, bias=False), down=(32, WIDTH)
):
    """An MLP whose hidden layer is multiplied by a gate."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Head(nn.Module):
    """Logits and cross-entropy, as in language models."""

    def __init__(self, classes: int = CLASSES, **options: Any) -> None:
        super().__init__()
        self.project, self.options = nn.Linear(WIDTH, classes, bias=False), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.project(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), **self.options)


class Difference(nn.Module):
    """A loss between two tensors of one shape."""

    def __init__(self, loss: Callable[..., Tensor], reduction: str) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, CLASSES)
        self.loss, self.reduction = loss, reduction

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        target = F.one_hot(labels.clamp(min=0), CLASSES).to(x.dtype)
        return self.loss(self.project(x), target, reduction=self.reduction)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 30), nn.GELU(), nn.Linear(30, WIDTH)),
    "gated": Gated,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "softmax": lambda: Function(lambda x: torch.softmax(x, -1)),
    "mixed": lambda: Function(lambda x: (x.exp() / x.exp().sum(-1, keepdim=True)).tanh()),
    "parts": lambda: Function(lambda x: torch.cat([p.sigmoid() for p in x.chunk(2, -1)], -1)),
    "transposed": lambda: Function(lambda x: x.transpose(0, 1).relu().transpose(0, 1)),
    "attention": lambda: Function(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
}
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Head(ignore_index=-100),
    "sum": lambda: Head(reduction="sum"),
    "smoothed": lambda: Head(label_smoothing=0.1),
    "squares": lambda: Difference(F.mse_loss, "mean"),
    "squares_sum": lambda: Difference(F.mse_loss, "sum"),
    "binary": lambda: Difference(F.binary_cross_entropy_with_logits, "mean"),
}


def built(layers: list[str], loss: str) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model([LAYERS[name]() for name in layers], LOSSES[loss]()).double()
    labels = torch.randint(0, CLASSES, (BATCH, TOKENS))
    if loss == "mean":
        labels[0, :2] = -100
    return model, (torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), labels)


def split_step(trace: Trace, model: nn.Module, batch: Batch, budget: str = "") -> Step:
    """Run a split trace: everything retained, or within a budget."""
    measured = remat.measure(trace, remat.Roofline("cpu"))
    schedule = remat.Schedule.keep_all(measured.graph())
    if budget:
        schedule = remat.solve(measured, budget, remat.Auto(gap=0.2, time_limit=2)).schedule
    return step(model, *batch, run=remat.lower(remat.rewrite(measured, schedule), model))


def assert_same_in_pieces(
    split: Trace, model: nn.Module, batch: Batch, budgets: Sequence[str] = ("",)
) -> None:
    """Check that a split trace computes what the model computes."""
    expected = step(model, *batch)
    for budget in budgets:
        assert_same(split_step(split, model, batch, budget), expected, tolerance=1e-10)


def regions(trace: Trace) -> list[Region]:
    """Return the regions of a trace around each tensor and each number of rows."""
    candidates: list[Region] = []
    for node in trace.nodes:
        for result in node.results:
            sizes = {BATCH, TOKENS, BATCH * TOKENS}
            for rows in sorted(sizes):
                for state in candidate_rows(result.tensor.shape, rows):
                    region = find_region(TraceIndex(trace), result.name, state)
                    candidates.extend([region] if region is not None else [])
    return candidates


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@hypothesis.given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3),
    loss=st.sampled_from(sorted(LOSSES)),
    data=st.data(),
)
def test_pieces_compute_what_the_whole_computed(
    layers: list[str], loss: str, data: st.DataObject
) -> None:
    model, batch = built(layers, loss)
    trace = remat.trace(model, batch)
    candidates = regions(trace)
    region = data.draw(st.sampled_from(candidates), label="region")
    pieces = data.draw(st.integers(2, region.rows), label="pieces")
    assert_same_in_pieces(split_regions([region], [pieces]), model, batch)


class Called(nn.Module):
    """A loss that is a function of a layer, an input and labels."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.function(self.layer, x, labels)


def several_parts(layer: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    one, two = layer(x).tanh().chunk(2, -1)
    three, four = two.exp().chunk(2, -1)
    return (one.sum(-1) * three.sum(-1)).sum() + four.flip(0).sum() + two.flip(0).sum()


def weighted(layer: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    weight = x.square().sum(-1, keepdim=True).expand(BATCH, TOKENS, 8)
    target = torch.full_like(weight, 0.25)
    return F.binary_cross_entropy(layer(x).sigmoid(), target, weight=weight.detach())


UNUSUAL: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    "frequencies": (
        lambda layer, x, labels: (layer(labels % 3) * x).tanh().sum(),
        lambda: nn.Embedding(8, WIDTH, scale_grad_by_freq=True),
    ),
    "whole slice": (
        lambda layer, x, labels: (
            layer(x).tanh() + layer(x).narrow(1, 0, TOKENS).exp()[:, -TOKENS:].sum()
        ).sum(),
        lambda: nn.Linear(WIDTH, 8),
    ),
    "squeezed": (
        lambda layer, x, labels: layer(x).tanh().squeeze(1).squeeze(0).sigmoid().sum(),
        lambda: nn.Linear(WIDTH, 8),
    ),
    "softmax of rows": (
        lambda layer, x, labels: (layer(x).tanh().squeeze(0).softmax(0) * 2).sum(1).exp().sum(),
        lambda: nn.Linear(WIDTH, 8),
    ),
    "several parts": (several_parts, lambda: nn.Linear(WIDTH, 8)),
    "weighted": (weighted, lambda: nn.Linear(WIDTH, 8)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_every_region_of_unusual_models_computes_the_same(name: str) -> None:
    function, make = UNUSUAL[name]
    torch.manual_seed(0)
    model = Called(function, make()).double()
    batch = (
        torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64),
        torch.randint(0, 8, (BATCH, TOKENS)),
    )
    trace = remat.trace(model, batch)
    different = {tuple(region.split_calls): region for region in regions(trace)}
    assert different
    for region in different.values():
        for pieces in {2, region.rows}:
            assert_same_in_pieces(split_regions([region], [pieces]), model, batch)


@pytest.mark.parametrize("loss", ["mean", "squares"])
def test_means_in_float16_are_not_turned_into_sums(loss: str) -> None:
    """A sum of thousands of elements exceeds the largest float16."""
    model, (x, labels) = built(["norm"], loss)
    trace = remat.trace(model.half(), (x.half(), labels))
    for region in regions(trace):
        sums = [state for state in region.produced.values() if isinstance(state, PartialSum)]
        assert all(state == PartialSum() for state in sums)


def head_region(trace: Trace) -> Region:
    seed = max(
        (r for n in trace.nodes for r in n.results if n.target == "aten.mm.default"),
        key=lambda r: r.tensor.shape[-1],
    )
    region = find_region(TraceIndex(trace), seed.name, Rows(0))
    assert region is not None
    return region


@pytest.mark.parametrize("loss", ["mean", "sum", "smoothed"])
def test_the_head_of_a_language_model_is_one_region(loss: str) -> None:
    """From the logits to the gradients of weight and input, in two stages: forward and backward.
    No tensor with all logits is left."""
    model, batch = built(["mlp"], loss)
    trace = remat.trace(model, batch)
    region = head_region(trace)
    states = region.produced
    targets = {trace.nodes[index].target for index in region.split_calls}
    assert {"aten._log_softmax.default", "aten.nll_loss_forward.default"} <= targets
    products = [i for i in region.split_calls if trace.nodes[i].target == "aten.mm.default"]
    assert len(products) == 3
    assert sum(isinstance(s, PartialSum) for s in states.values()) >= 2
    split = split_regions([region], [4])
    elements = [prod(r.tensor.shape) for node in split.nodes for r in node.results]
    assert max(elements) < BATCH * TOKENS * CLASSES
    if loss != "smoothed":
        assert set(stages(region).values()) == {0, 1}


def test_a_region_is_the_same_from_each_of_its_large_tensors() -> None:
    """It does not depend on the order in which operations are added."""
    model, batch = built(["norm"], "mean")
    trace = remat.trace(model, batch)
    region = head_region(trace)
    large = [
        (result.name, state)
        for index in region.split_calls
        for result in trace.nodes[index].results
        if isinstance(state := region.produced[result.name], Rows)
        and prod(result.tensor.shape) == BATCH * TOKENS * CLASSES
    ]
    assert len(large) > 5
    for name, state in large:
        other = find_region(TraceIndex(trace), name, state)
        assert other is not None
        assert other.split_calls.keys() == region.split_calls.keys()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_a_split_step_runs_where_one_operation_made_the_smallest_peak(pieces: int) -> None:
    """The logits of 64 x 500 make the peak; the smallest one falls with the number of pieces."""
    torch.manual_seed(0)
    model = Model([LAYERS["mlp"]()], Head(500)).double()
    batch = torch.randn(8, 8, WIDTH, dtype=torch.float64), torch.randint(0, 500, (8, 8))
    trace = remat.trace(model, batch)
    split = split_regions([head_region(trace)], [pieces])
    logits_bytes = 64 * 500 * 8
    whole_peak, split_peak = (
        remat.solve(remat.measure(t, remat.Roofline("cpu")), "min").peak_bytes
        for t in (trace, split)
    )
    assert split_peak < whole_peak - logits_bytes * (1 - 1 / pieces)
    assert_same_in_pieces(split, model, batch, ["min"])


def test_a_loss_with_all_labels_ignored_is_nan_as_in_eager_mode() -> None:
    model, (x, labels) = built(["norm"], "mean")
    batch = (x, torch.full_like(labels, -100))
    split = split_regions([head_region(remat.trace(model, batch))], [3])
    assert torch.isnan(step(model, *batch).loss)
    assert torch.isnan(split_step(split, model, batch).loss)


def test_random_operations_are_outside() -> None:
    model, batch = built(["mlp"], "mean")
    model.layers.append(nn.Dropout(0.5))
    trace = remat.trace(model.train(), batch)
    assert any(node.random for node in trace.nodes)
    for region in regions(trace):
        assert not [i for i in region.split_calls if trace.nodes[i].random]


@pytest.mark.parametrize("pieces", [0, 1, 13])
def test_the_number_of_pieces_is_checked(pieces: int) -> None:
    model, batch = built(["mlp"], "mean")
    region = head_region(remat.trace(model, batch))
    with pytest.raises(remat.RematError, match="12 rows cannot be split into"):
        split_regions([region], [pieces])
