"""Splitting a region: pieces compute what the whole computed, for any operators, seed and count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
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
from torch.nn.functional import cross_entropy

import remat
from remat.costs.roofline import operation_flops, operation_seconds
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result
from remat.documents.targets import (
    ADD_PRODUCT_TARGET,
    ADD_TARGET,
    OVERWRITING_TARGETS,
    WRITE_ROWS_TARGET,
)
from remat.documents.trace import Trace
from remat.frontend.runtime.operations import write_rows
from remat.passes.split.regions import Region, TraceIndex, find_region
from remat.passes.split.rewriting import split_regions
from remat.passes.split.splits import (
    find_peak_region,
    large_operations,
    split_largest_operations,
    with_recorded_splits,
)
from remat.passes.split.stages import operation_stages, split_bytes
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
        assert set(operation_stages(region).values()) == {0, 1}


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


# -- several regions ------------------------------------------------------------------------------

IDENTICAL_LAYERS = 3


def wide_layers() -> tuple[Model, Batch]:
    """Return a model whose layers need the same memory, and more than the head does."""
    _, batch = built([], "mean")
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, 300), nn.GELU(), nn.Linear(300, WIDTH))
        for _ in range(IDENTICAL_LAYERS)
    ]
    return Model(layers, Head()).double(), batch


def test_identical_layers_are_split_at_once() -> None:
    """Each layer is a region; the step computes the same, retained or recomputed."""
    model, batch = wide_layers()
    trace = remat.trace(model, batch)
    split = split_largest_operations(trace, 3)
    assert [record.with_previous for record in split.splits] == [False] + [True] * (
        IDENTICAL_LAYERS - 1
    )
    assert_same_in_pieces(split, model, batch, ["", "75%"])


def test_layers_split_at_once_are_those_split_one_after_the_other() -> None:
    """The same operations, with the same names, in another order."""
    model, batch = wide_layers()
    trace = remat.trace(model, batch)
    split = split_largest_operations(trace, 2)
    one_by_one = with_recorded_splits(
        trace, [r.model_copy(update={"with_previous": False}) for r in split.splits]
    )
    assert {n.name: n.target for n in split.nodes} == {n.name: n.target for n in one_by_one.nodes}
    assert with_recorded_splits(trace, split.splits).nodes == split.nodes


def test_the_region_of_an_operation_contains_it() -> None:
    """Outside of its region, an operation reads the tensors whole. Pieces have no region."""
    for trace in (remat.trace(*wide_layers()), remat.trace(*built([], "mean"))):
        split = split_largest_operations(trace, 3)
        for form in (trace, split):
            index = TraceIndex(form)
            for number, operation in enumerate(form.graph_of_sizes.operations):
                region = find_peak_region(index, number)
                if region is not None:
                    node = index.nodes_by_name[operation.name]
                    assert node in region.split_calls
                    assert not form.nodes[node].piece_of
        assert any(node.piece_of for node in split.nodes)


def overlapping(trace: remat.Trace) -> tuple[Region, Region]:
    """Return two regions with tensors in common."""
    pairs = product(regions(trace), repeat=2)
    return next(
        (one, other) for one, other in pairs if one.seed != other.seed and one.depends_on(other)
    )


def test_regions_with_tensors_in_common_are_not_split_at_once() -> None:
    trace = remat.trace(*wide_layers())
    with pytest.raises(remat.RematError, match="tensors in common"):
        split_regions(overlapping(trace), [2, 2])


def test_recorded_splits_of_one_region_are_not_applied_at_once() -> None:
    trace = remat.trace(*wide_layers())
    (record,) = split_regions([regions(trace)[0]], [2]).splits
    with pytest.raises(remat.RematError, match="tensors in common"):
        with_recorded_splits(trace, [record, record.model_copy(update={"with_previous": True})])


# -- the region around the largest operation -------------------------------------------------------


def measured(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Trace:
    return remat.measure(remat.trace(model, batch, differentiate="all"), remat.Roofline("cpu"))


def region_at_peak(trace: Trace) -> Region | None:
    """Return the region around the operation that needs the most memory."""
    return find_peak_region(TraceIndex(trace), large_operations(trace.graph_of_sizes, 0)[0])


def test_the_region_of_a_head_has_the_most_rows() -> None:
    """All tokens of all sequences, though batch and tokens are two dimensions."""
    _, (x, _) = built([], "mean")
    model = Model([nn.LayerNorm(6)], Head(400)).double()
    trace = measured(model, (x, torch.zeros(3, 4, dtype=torch.long)))
    region = region_at_peak(trace)
    assert region is not None
    assert region.rows == 12
    logits_bytes = 12 * 400 * 8
    assert split_bytes(region) >= 4 * logits_bytes
    operation = trace.graph().operations[large_operations(trace.graph(), 0)[0]]
    assert operation.name in {trace.nodes[index].name for index in region.split_calls}


def test_a_large_gradient_of_the_caller_is_read_by_rows() -> None:
    """The largest tensors are an output and its tangent, which no operation produces. What is
    computed from the tangent can be split."""

    def large(layer: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return layer(x).sum(-1, keepdim=True).expand(3, 4, 4000) * 1.0

    batch = torch.randn(3, 4, 6), torch.zeros(3, 4)
    trace = measured(Called(large, nn.Linear(6, 8)), batch)
    values = trace.graph().values
    operation = trace.graph().operations[large_operations(trace.graph(), 0)[0]]
    sizes = [values[v].size_bytes for v in (*operation.inputs, *operation.outputs)]
    assert max(sizes) == 3 * 4 * 4000 * 4
    region = region_at_peak(trace)
    assert region is not None
    tangent = next(p.name for p in trace.placeholders if p.kind == "tangent")
    assert isinstance(region.states[tangent], Rows)
    assert tangent not in region.produced


# -- operations that put pieces together in place --------------------------------------------------


@pytest.fixture(scope="module")
def split() -> Trace:
    model, batch = built(["mlp"], "mean")
    return split_regions([head_region(remat.trace(model, batch))], [4])


def test_sums_and_buffers_take_their_memory_once(split: Trace) -> None:
    graph = remat.measure(split, remat.Roofline("cpu")).graph()
    timeline = remat.simulate(graph, remat.Schedule.keep_all(graph))
    targets = [None if node is None else node.target for node in split.operations]
    overwriting = [
        run
        for run, operation in enumerate(graph.operations)
        if operation.overwrites and targets[run] in OVERWRITING_TARGETS
    ]
    assert len(overwriting) == 6  # gradients of weight and input: three further pieces of each
    for run in overwriting:
        operation = graph.operations[run]
        (before,) = operation.overwrites
        assert graph.consumers[before] == (run,)
        assert not operation.recomputable
        assert timeline.during_bytes[run] == timeline.before_bytes[run]


def test_a_tensor_cannot_be_read_after_it_was_overwritten(split: Trace) -> None:
    total = next(
        node.args[0]
        for node in split.nodes
        if node.target in OVERWRITING_TARGETS and isinstance(node.args[0], Ref)
    )
    meta = next(r.tensor for n in split.nodes for r in n.results if Ref(r.name) == total)
    storage = len(split.storage_bytes)
    reader = Node(
        name="reader",
        target="aten.neg.default",
        args=(total,),
        results=(Result(name="reader", tensor=meta, storage=storage),),
        backward=True,
    )
    with pytest.raises(ValueError, match=r"reader reads .* after it was overwritten"):
        split.replace(
            nodes=(*split.nodes, reader), storage_bytes=(*split.storage_bytes, meta.shape[0] * 8)
        )


def test_a_tensor_of_the_caller_cannot_be_overwritten(split: Trace) -> None:
    product = next(n for n in split.nodes if n.target == ADD_PRODUCT_TARGET)
    parameter = next(p for p in split.placeholders if p.kind == "parameter")
    changed = product.model_copy(update={"args": (Ref(parameter.name), *product.args[1:])})
    nodes = tuple(changed if node is product else node for node in split.nodes)
    with pytest.raises(ValueError, match="overwrites a tensor of the caller"):
        split.replace(nodes=nodes)


def test_a_gradient_cannot_be_overwritten_nor_a_tensor_added_to_itself(split: Trace) -> None:
    gradient, parameter = split.gradients[0].name, split.gradients[0].placeholder
    meta = next(r.tensor for n in split.nodes for r in n.results if r.name == gradient)
    result = Result(name="doubled", tensor=meta, storage=len(split.storage_bytes))
    addition = Node(
        name="doubled", target=ADD_TARGET, args=(Ref(gradient), Ref(gradient)), results=(result,),
        backward=True, recomputable=False,
    )  # fmt: skip
    changes = {"storage_bytes": (*split.storage_bytes, 8), "nodes": (*split.nodes, addition)}
    with pytest.raises(ValueError, match="doubled reads the tensor that it overwrites"):
        split.replace(**changes)
    other = addition.model_copy(update={"args": (Ref(gradient), Ref(parameter))})
    with pytest.raises(ValueError, match="doubled overwrites a tensor of the caller"):
        split.replace(**changes | {"nodes": (*split.nodes, other)})


def test_costs_are_those_of_a_piece(split: Trace) -> None:
    """A product counts its arithmetic; rows that are written into a buffer, their own traffic."""
    metas = {p.name: p.tensor for p in split.placeholders}
    metas.update((r.name, r.tensor) for n in split.nodes for r in n.results)
    roofline = remat.Roofline("h100")
    product = next(n for n in split.nodes if n.target == ADD_PRODUCT_TARGET)
    rows, classes, width = 3, 40, 6
    assert operation_flops(product, metas.__getitem__) == 2 * rows * classes * width
    (writing, *_) = (n for n in split.nodes if n.target == WRITE_ROWS_TARGET)
    piece_bytes = rows * width * 8
    expected_s = roofline.seconds(0, 2 * piece_bytes, "float64")
    assert operation_seconds(writing, metas, roofline) == pytest.approx(expected_s)


def test_rows_are_written_in_the_buffers_layout() -> None:
    """Also where several dimensions are the rows, and where they are the columns of a matrix."""
    whole = torch.arange(24.0).reshape(2, 3, 4)
    buffer = None
    for start in (0, 2, 4):
        piece = whole.reshape(6, 4)[start : start + 2].unsqueeze(0)
        buffer = write_rows(buffer, piece, (2, 3, 4), (12, 4, 1), 0, 2, start)
    assert buffer is not None
    assert torch.equal(buffer, whole)
    columns = whole.reshape(6, 4).t()
    buffer = None
    for start in (0, 4):
        part = columns[:, start : start + (4 if start == 0 else 2)]
        buffer = write_rows(buffer, part, (4, 6), (1, 4), 1, 1, start)
    assert buffer is not None
    assert torch.equal(buffer, columns)
    assert buffer.stride() == (1, 4)


class LargeHead(WithParts, layer=(256, 256), head=lambda: nn.Linear(256, 2048, bias=False)):
    """A projection to many classes and the loss, large enough that products take most time."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.layer(x)), target)


def test_a_product_that_is_added_is_timed_like_any_product() -> None:
    batch = (torch.randn(1024, 256), torch.randint(0, 2048, (1024,)))
    whole = remat.trace(LargeHead(), batch)
    trace = remat.measure(split_regions([head_region(whole)], [2]), cache=False)
    (added,) = (n for n in trace.nodes if n.target == ADD_PRODUCT_TARGET)
    product = next(
        node
        for node in trace.nodes
        if node.target == "aten.mm.default" and node.results[0].tensor == added.results[0].tensor
    )
    assert added.cost_s is not None
    assert product.cost_s is not None
    assert 0.1 <= added.cost_s / product.cost_s <= 10
