"""Mixtures of experts: the memory of a step with balanced and with worst-case routing.

A capture has fixed shapes, so its memory cannot depend on the routing: the experts compute all
pairs of a token and one of its experts, in grouped products or with gathered weights. A loop over
experts, whose shapes depend on the routing, cannot be captured.
"""

from __future__ import annotations

from remat.documents.arguments import Ref
from remat.documents.trace import Node, Trace

_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Products whose rows are sorted by expert."""

_GATHER = "aten.index.Tensor"
_EXPERT_WEIGHT_DIMENSIONS = 3
"""The dimensions of a parameter with a matrix for each expert."""


def routing_notes(trace: Trace) -> list[str]:
    """Return a sentence about both routings of a mixture of experts; none for other models."""
    weights = {
        p.name
        for p in trace.placeholders
        if p.kind == "parameter" and len(p.tensor.shape) == _EXPERT_WEIGHT_DIMENSIONS
    }
    for node in trace.nodes:
        if node.backward or not node.results or not node.results[0].tensor.shape:
            continue
        if node.target in _GROUPED:
            how = "grouped products"
        elif node.target == _GATHER and _first_name(node) in weights:
            how = "products with gathered weights"
        else:
            continue
        rows = node.results[0].tensor.shape[0]
        return [
            "balanced and worst-case routing of experts need the same memory: their "
            f"{how} have {rows:,} rows (tokens times experts per token), whatever the experts"
        ]
    return []


def _first_name(node: Node) -> str:
    return node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
