"""The region that is split first: around what one operation needs."""

from __future__ import annotations

import torch
from tests.torch.split.test_split_region import Called, Head, Model, built
from torch import nn

import remat
from remat.documents.trace import Trace
from remat.passes.split.regions import Region, TraceIndex
from remat.passes.split.splits import find_peak_region, large_operations
from remat.passes.split.stages import split_bytes
from remat.passes.split.states import Rows


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
