"""The memory of a training step in eager mode, where it differs from a captured step that runs each
operation once.

Autograd frees a node's saved tensors only after the node's whole backward has run, and sums the
gradients of a tensor in place where it can. On the CPU, dropout's masks are larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from remat.costs.roofline import item_bytes
from remat.documents.arguments import Ref, referenced_names
from remat.documents.trace import Node, Trace
from remat.graph import Graph, Operation
from remat.schedule import Schedule
from remat.simulate import simulate

_DROPOUT = "aten.native_dropout_backward.default"
"""The operation that multiplies with dropout's mask: in the backward, and also in the forward (see
`capture.eager_kernels.dropout`)."""
_PRODUCTS = ("aten.mul.Tensor", "aten.mm.default", "aten.bmm.default")
"""Operations of the backward formula of a product, one for each operand."""
_SUM = "aten.sum.dim_IntList"
"""Another operation of these formulas: the gradient of a bias."""
_ADDITION = "aten.add.Tensor"
_CAST = "aten._to_copy.default"


def eager_peak_bytes(trace: Trace) -> int:
    """Return the peak of a step in eager mode: `Estimate.peak_bytes`, without the rest."""
    graph = eager_graph(with_eager_masks(trace))
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def with_eager_masks(trace: Trace) -> Trace:
    """Return the trace with the size that dropout's masks have in eager mode on the CPU: not bool,
    but scaled, in the dtype of the tensor that they are multiplied with."""
    if trace.device.partition(":")[0] != "cpu":
        return trace
    storages = list(trace.storage_bytes)
    for node in trace.nodes:
        is_dropout = node.target == _DROPOUT and not node.backward
        mask = node.args[1] if is_dropout and len(node.args) > 1 and node.results else None
        if isinstance(mask, Ref):
            dropped = node.results[0].tensor
            storages[trace.storage_of[mask.name]] = prod(dropped.shape) * item_bytes(dropped.dtype)
    return trace.replace(storage_bytes=tuple(storages))


def eager_graph(trace: Trace) -> Graph:
    """Return the graph of a step as autograd frees its tensors, for schedules that run each
    operation once."""
    graph = trace.graph()
    # Autograd writes over no argument, except when it adds gradients in place (below).
    operations = tuple(replace(operation, overwrites=()) for operation in graph.operations)
    graph = _with_retained_factors(replace(graph, operations=operations), trace)
    return _with_gradients_added_in_place(graph, trace)


def value_of_storage(trace: Trace, graph: Graph) -> dict[int, int]:
    """Return the graph's value of each storage, without the storages of constant memory."""
    index = {value.name: v for v, value in enumerate(graph.values)}
    return {storage: index[name] for name, storage in trace.storage_of.items() if name in index}


def _with_retained_factors(graph: Graph, trace: Trace) -> Graph:
    """Return the graph in which the last operation of a backward formula reads what the others
    read: autograd releases the operands of a product only after both gradients are computed and
    cast to the operands' dtypes. `formula` are the operations of the formula so far."""
    operations = list(graph.operations)
    dtype_of = {p.name: p.tensor.dtype for p in trace.placeholders}
    dtype_of |= {r.name: r.tensor.dtype for node in trace.nodes for r in node.results}
    formula: tuple[Node, ...] = ()
    gradients = frozenset[int]()  # read by each product and sum of the formula
    for index, node in enumerate(trace.operations):
        read = frozenset(v for v in graph.operations[index].inputs if _is_of_backward(graph, v))
        if node is None:
            continue
        targets = {_SUM, *(first.target for first in formula[:1])}
        is_gradient = bool(gradients & read) and node.target in targets
        if is_gradient or _casts_to_factor(node, formula, dtype_of):
            formula = (*formula, node)
            gradients = gradients & read if is_gradient else gradients
            inputs = {*operations[index - 1].inputs, *operations[index].inputs}
            operations[index] = replace(operations[index], inputs=tuple(sorted(inputs)))
        elif node.backward and node.target in _PRODUCTS:
            formula, gradients = (node,), read
        else:
            formula, gradients = (), frozenset()
    return replace(graph, operations=tuple(operations))


def _casts_to_factor(node: Node, formula: Sequence[Node], dtype_of: Mapping[str, str]) -> bool:
    """True if an operation casts a gradient of the formula to the dtype of a factor, as autograd
    does where the factors of a product have different dtypes."""
    if node.target != _CAST:
        return False
    gradient_names = {result.name for n in formula for result in n.results}
    factor_dtypes = {dtype_of[name] for n in formula for name in referenced_names(n.args)}
    return (
        bool(node.results)
        and not gradient_names.isdisjoint(referenced_names(node.args))
        and node.results[0].tensor.dtype in factor_dtypes
    )


def _with_gradients_added_in_place(graph: Graph, trace: Trace) -> Graph:
    """Return the graph in which a sum of two gradients overwrites the first one.

    Autograd adds each further gradient of a tensor into the earlier ones, if nothing else holds
    their storage: the first gradient must not be a view, whose base would hold it. If another
    operation still needs the earlier sum, a later run reads it, and the simulator keeps both."""
    allocated = {r.name for node in trace.nodes if not node.view for r in node.results}
    value_of = value_of_storage(trace, graph)
    operations = list(graph.operations)
    for index, node in enumerate(trace.operations):
        # Autograd's own sums belong to no module; those of a backward formula do.
        if node is None or not node.backward or node.target != _ADDITION or node.module:
            continue
        augend = node.args[0] if node.args else None
        if not isinstance(augend, Ref) or augend.name not in allocated:
            continue
        value = value_of.get(trace.storage_of[augend.name])
        if value is not None and _can_overwrite(graph, operations[index], value):
            operations[index] = replace(operations[index], overwrites=(value,), recomputable=False)
    return replace(graph, operations=tuple(operations))


def _can_overwrite(graph: Graph, addition: Operation, value: int) -> bool:
    """True if `value` is a gradient as large as the sum, and not a result of the step."""
    size_bytes = sum(graph.values[v].size_bytes for v in addition.outputs)
    return (
        value in addition.inputs
        and value not in graph.results
        and _is_of_backward(graph, value)
        and graph.values[value].size_bytes == size_bytes
    )


def _is_of_backward(graph: Graph, value: int) -> bool:
    return graph.operations[graph.producer[value]].backward
