"""Why the head of a language model stays whole, and what to write instead."""

from __future__ import annotations

from remat.documents.records import Node
from remat.documents.trace import Trace
from remat.passes.split.moved_slices import CASTS, VIEWS, with_moved_slices
from remat.passes.split.regions import TraceIndex

_SLICE = "aten.slice.Tensor"
_TRANSPOSES = ("aten.transpose.int", "aten.permute.default")
_COPIES = (*VIEWS, *CASTS, "aten.clone.default")
_LOSSES = ("aten._log_softmax.default", "aten.amax.default", "aten.logsumexp.default")
"""The first operations of a cross-entropy loss."""

_SHIFT = " with all logits, and shift the labels instead, with -100 where there is none"

_MIN_SHARE = 0.25
"""The smallest logits that are reported, as a share of the largest tensor of the step."""


def split_obstacle(trace: Trace) -> str:
    """Return a sentence, without its full stop, about logits that are sliced or transposed before
    their loss, so that they cannot be split with it; "" without any. It begins with the path of the
    module that computes them, if that is known."""
    trace = with_moved_slices(trace)  # these can be split
    index = TraceIndex(trace)
    produced = {r.storage for node in trace.nodes for r in node.results}
    least_bytes = _MIN_SHARE * max((trace.storage_bytes[s] for s in produced), default=0)
    for node in trace.nodes:
        if node.backward or node.piece_of or node.target not in (_SLICE, *_TRANSPOSES):
            continue
        (source,) = node.operand_names
        is_large = trace.storage_bytes[trace.storage_of[source]] >= least_bytes
        if is_large and _changes_rows(trace, node, source) and _is_read_by_loss(index, node):
            is_slice = node.target == _SLICE
            module = trace.nodes[index.producer[source]].module if source in index.producer else ""
            return (
                f"{f'{module}: ' if module else ''}the logits are "
                f"{'sliced' if is_slice else 'transposed'} before their loss ({node.name}), so "
                "that they exist as a whole; write F.cross_entropy(logits.flatten(0, 1), "
                f"labels.flatten()){_SHIFT if is_slice else ''}"
            )
    return ""


def _changes_rows(trace: Trace, node: Node, source: str) -> bool:
    """True if the node changes the dimensions before the last one, of three or more."""
    before, after = trace.tensors[source].shape, node.results[0].tensor.shape
    return len(before) >= 3 and before[:-1] != after[:-1]


def _is_read_by_loss(index: TraceIndex, node: Node) -> bool:
    """True if a cross-entropy loss reads the result of a node, or a copy or view of it."""
    pending = [node.results[0].name]
    while pending:
        for number in index.consumers.get(pending.pop(), ()):
            reader = index.trace.nodes[number]
            if reader.target in _LOSSES:
                return True
            if reader.target in (*_COPIES, _SLICE, *_TRANSPOSES):
                pending += [result.name for result in reader.results]
    return False
