"""Tensors that can be offloaded, each for one span of the step in which nothing reads it.

For a tensor of the forward that is from its last use in the forward to its first in the backward;
for one of the backward, such as the gradient of a skip connection, the longest span between two
uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from remat.costs.roofline import item_bytes
from remat.documents.records import TensorMeta
from remat.documents.targets import OFFLOAD_TARGETS
from remat.documents.trace import Trace
from remat.graph import Graph


class IdleSpan(NamedTuple):
    """The operations between which a tensor can be on the host: the last that uses it before, and
    the first that reads it after, None if there is none: then only recomputations read what comes
    back."""

    last_use: int
    next_reader: int | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that can be offloaded, with indices of `Trace.nodes`: its producer, and the
    operations before and after the span in which it can be on the host. `result` is its index among
    the producer's results."""

    tensor: str
    size_bytes: int
    producer: int
    result: int
    idle: IdleSpan


def offload_candidates(trace: Trace) -> tuple[Candidate, ...]:
    """Return the tensors that can be offloaded, in the order of their producers.

    They are results of operations that fill their storage. Inputs of the graph, outputs, gradients
    of parameters and inputs, and storages that an operation writes over are left out.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    excluded = {p.storage for p in trace.placeholders}
    excluded |= {trace.storage_of[item.name] for item in (*trace.outputs, *trace.gradients)}
    for index, (node, operands) in enumerate(zip(trace.nodes, trace.operands, strict=True)):
        if node.view:
            continue  # a view reads nothing, and exists where an operation reads it
        for storage in {trace.storage_of[name] for name in operands}:
            readers[storage].append(index)
            if node.target in OFFLOAD_TARGETS:
                excluded.add(storage)
        excluded.update(trace.overwritten_storages(node))
    return tuple(_candidates(trace, readers, excluded))


def _candidates(
    trace: Trace, readers: dict[int, list[int]], excluded: set[int]
) -> Iterator[Candidate]:
    position, is_backward = [0], [node.backward for node in trace.nodes]
    for node in trace.nodes:  # views take no time
        position.append(position[-1] + (not node.view))
    for index, node in enumerate(trace.nodes):
        if node.view or node.target in OFFLOAD_TARGETS:
            continue
        for number, result in enumerate(node.results):
            size = trace.storage_bytes[result.storage]
            if result.storage in excluded or not fills_storage(result.tensor, size):
                continue
            idle = _idle_span(index, readers[result.storage], is_backward, position)
            if idle is not None:
                yield Candidate(result.name, size, index, number, idle)


def idle_spans(graph: Graph, values: Iterable[int]) -> dict[int, IdleSpan]:
    """Return the spans in which values of a graph can be on the host, as indices of operations.
    Values of the backward that are read at once have none."""
    is_backward = [operation.backward for operation in graph.operations]
    position = range(len(is_backward))
    spans = {
        v: _idle_span(graph.producer[v], graph.consumers[v], is_backward, position) for v in values
    }
    return {v: span for v, span in spans.items() if span is not None}


def _idle_span(
    producer: int, readers: Sequence[int], is_backward: Sequence[bool], position: Sequence[int]
) -> IdleSpan | None:
    """Return the idle span of a value. `position` has the number of operations before each. A span
    of the backward has at least one operation within."""
    if is_backward[producer]:
        uses = sorted({producer, *readers})
        spans = [*pairwise(uses)]
        lengths = [position[reader] - position[use] for use, reader in spans]
        longest = max(lengths, default=0)
        return IdleSpan(*spans[lengths.index(longest)]) if longest > 1 else None
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
