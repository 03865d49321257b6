"""Tensors of the forward that can be offloaded after their last use in the forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from remat.costs.roofline import item_bytes
from remat.documents.records import TensorMeta
from remat.documents.targets import OFFLOAD_TARGETS
from remat.documents.trace import Trace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that can be offloaded, with indices of `Trace.nodes`: its producer, its last reader
    in the forward (or the producer), and its first reader in the backward, None if there is none:
    then only recomputations read what comes back. `result` is its index among the producer's
    results."""

    tensor: str
    size_bytes: int
    producer: int
    result: int
    last_forward_reader: int
    first_backward_reader: int | None


def offload_candidates(trace: Trace) -> tuple[Candidate, ...]:
    """Return the tensors that can be offloaded, in the order of their producers.

    They are results of the forward that fill their storage. Inputs of the graph, outputs,
    gradients, and storages that an operation writes over are left out.
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
    for index, node in enumerate(trace.nodes):
        if node.view or node.backward or node.target in OFFLOAD_TARGETS:
            continue
        for number, result in enumerate(node.results):
            size = trace.storage_bytes[result.storage]
            if result.storage in excluded or not fills_storage(result.tensor, size):
                continue
            forward = [i for i in readers[result.storage] if not trace.nodes[i].backward]
            backward = [i for i in readers[result.storage] if trace.nodes[i].backward]
            last, first = max(forward, default=index), min(backward, default=None)
            yield Candidate(result.name, size, index, number, last, first)


def fills_storage(tensor: TensorMeta, size_bytes: int) -> bool:
    """True if a tensor's elements are all bytes of its storage, in any order of dimensions."""
    elements = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    is_whole = prod(tensor.shape) * item_bytes(tensor.dtype) == size_bytes
    return is_whole and tensor.offset == 0 and size_bytes > 0
