"""Gradient accumulation as a rewriting of the Trace: where every parameter has a `.grad` already,
each gradient is added into it as soon as it is there."""

from __future__ import annotations

from remat.documents.arguments import Ref, refs
from remat.documents.records import Node
from remat.documents.trace import ACCUMULATE, Trace


def accumulation_name(placeholder: str) -> str:
    """Name of the operation that adds a parameter's gradient into its `.grad`."""
    return f"accumulate_{placeholder}"


def with_accumulation(trace: Trace) -> Trace:
    """The same step where every parameter has a `.grad` already: each gradient is added into it as
    soon as it is there, instead of being held to the end beside it."""
    if trace.accumulating:
        return trace
    parameters = {p.name for p in trace.placeholders if p.kind == "parameter"}
    sinks: dict[str, list[Node]] = {}
    for gradient in trace.gradients:
        if gradient.placeholder in parameters:
            node = Node(
                name=accumulation_name(gradient.placeholder),
                target=ACCUMULATE,
                args=(Ref(gradient.placeholder), Ref(gradient.name)),
                backward=True,
                recomputable=False,
            )
            sinks.setdefault(gradient.name, []).append(node)
    nodes: list[Node] = []
    for node in reversed(trace.nodes):  # behind the last node that makes or reads the gradient
        names = (*refs((node.args, *node.kwargs.values())), *(r.name for r in node.results))
        for name in names:
            nodes.extend(sinks.pop(name, ()))
        nodes.append(node)
    nodes.reverse()
    return trace.replace(nodes=tuple(nodes), accumulating=True)
