"""A pass for gradient accumulation, for a step in which every parameter has a `.grad` already."""

from __future__ import annotations

from remat.documents.arguments import Ref
from remat.documents.records import Node
from remat.documents.targets import ACCUMULATE_TARGET
from remat.documents.trace import Trace


def accumulation_operation_name(placeholder: str) -> str:
    """Return the name of the operation that adds a parameter's gradient into its `.grad`."""
    return f"accumulate_{placeholder}"


def with_gradient_accumulation(trace: Trace) -> Trace:
    """Return the same step, in which each parameter's gradient is added into its existing `.grad`
    as soon as it is computed; the same trace if it does that already. Without this, each gradient
    would be live until the step ends."""
    if trace.accumulates_gradients:
        return trace
    parameters = {p.name for p in trace.placeholders if p.kind == "parameter"}
    accumulations: dict[str, list[Node]] = {}
    for gradient in trace.gradients:
        if gradient.placeholder in parameters:
            node = Node(
                name=accumulation_operation_name(gradient.placeholder),
                target=ACCUMULATE_TARGET,
                args=(Ref(gradient.placeholder), Ref(gradient.name)),
                backward=True,
                recomputable=False,
            )
            accumulations.setdefault(gradient.name, []).append(node)
    nodes: list[Node] = []
    for node in reversed(trace.nodes):  # after the last node that produces or reads the gradient
        names = (
            *node.operand_names,
            *(r.name for r in node.results),
        )
        for name in names:
            nodes.extend(accumulations.pop(name, ()))
        nodes.append(node)
    nodes.reverse()
    return trace.replace(nodes=tuple(nodes), accumulates_gradients=True)
