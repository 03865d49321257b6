"""Operations that put pieces together in place: their memory, their costs, and their checks."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.training.models import WithParts
from tests.torch.split.test_split_region import built, head_region
from torch import nn
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
from remat.passes.split.rewriting import split_regions


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


class Head(WithParts, layer=(256, 256), head=lambda: nn.Linear(256, 2048, bias=False)):
    """A projection to many classes and the loss, large enough that products take most time."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.layer(x)), target)


def test_a_product_that_is_added_is_timed_like_any_product() -> None:
    batch = (torch.randn(1024, 256), torch.randint(0, 2048, (1024,)))
    whole = remat.trace(Head(), batch)
    trace = remat.measure(split_regions([head_region(whole)], [2]), cache=False)
    (added,) = (n for n in trace.nodes if n.target == ADD_PRODUCT_TARGET)
    product = next(
        node
        for node in trace.nodes
        if node.target == "aten.mm.default" and node.results[0].tensor == added.results[0].tensor
    )
    assert added.cost_s is not None
    assert product.cost_s is not None
    assert 0.4 <= added.cost_s / product.cost_s <= 2.5
