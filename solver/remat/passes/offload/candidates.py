"""Tensors that can be offloaded, each for one span of the step in which nothing reads it.

For a tensor of the forward that is from its last use in the forward to its first in the backward;
for one of the backward, such as the gradient of a skip connection, the longest span between two
uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from remat.costs.layouts import item_bytes
from remat.documents.records import TensorMeta
from remat.documents.targets import OFFLOAD_TARGETS
from remat.documents.trace import Trace
from remat.graph import Graph


class IdleSpan(NamedTuple):
    """The operations between which a tensor can be on the host: the last that uses it before, and
    the first that reads it after; None if only recomputations read what comes back."""

    last_use: int
    next_reader: int | None


def offloadable_values(trace: Trace) -> list[int]:
    """Return the values of the trace's graph that can be offloaded.

    They are results of operations that fill their storage. Inputs of the graph, outputs, gradients
    of parameters and inputs, and storages that an operation writes over are left out.
    """
    graph = trace.graph()
    excluded = {p.storage for p in trace.placeholders}
    excluded |= {trace.storage_of[item.name] for item in (*trace.outputs, *trace.gradients)}
    for node in trace.nodes:
        if node.target in OFFLOAD_TARGETS:
            excluded |= {trace.storage_of[name] for name in node.operand_names}
            excluded |= {result.storage for result in node.results}
        excluded.update(trace.overwritten_storages(node))
    storages = [trace.storage_of[value.name] for value in graph.values]
    filling = (
        v
        for v, (value, storage) in enumerate(zip(graph.values, storages, strict=True))
        if storage not in excluded
        and fills_storage(trace.tensors[value.name], trace.storage_bytes[storage])
    )
    return list(idle_spans(graph, filling))


def idle_spans(graph: Graph, values: Iterable[int]) -> dict[int, IdleSpan]:
    """Return the spans in which values of a graph can be on the host, as indices of operations.
    Values of the backward that are read at once have none."""
    is_backward = [operation.backward for operation in graph.operations]
    spans = {v: _idle_span(graph.producer[v], graph.consumers[v], is_backward) for v in values}
    return {v: span for v, span in spans.items() if span is not None}


def _idle_span(
    producer: int, readers: Sequence[int], is_backward: Sequence[bool]
) -> IdleSpan | None:
    """Return the idle span of a value. For a value of the backward it is the longest span between
    two uses; None if no operation runs within."""
    if is_backward[producer]:
        spans = [*pairwise(sorted({producer, *readers}))]
        longest = max(spans, key=lambda span: span[1] - span[0], default=(0, 0))
        return IdleSpan(*longest) if longest[1] - longest[0] > 1 else None
    forward = [i for i in readers if not is_backward[i]]
    backward = [i for i in readers if is_backward[i]]
    return IdleSpan(max(forward, default=producer), min(backward, default=None))


def fills_storage(tensor: TensorMeta, size_bytes: int) -> bool:
    """True if a tensor's elements are all bytes of its storage, in any order of dimensions."""
    elements = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    is_whole = prod(tensor.shape) * item_bytes(tensor.dtype) == size_bytes
    return is_whole and tensor.offset == 0 and size_bytes > 0
