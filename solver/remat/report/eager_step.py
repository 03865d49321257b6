"""The memory of a training step in eager mode, where it differs from a captured step that runs each
operation once.

Autograd frees a node's saved tensors only after the node's whole backward has run, and sums the
gradients of a tensor in place where it can. On the CPU, dropout's masks are larger.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from remat.costs.layouts import item_bytes
from remat.documents.arguments import Ref, referenced_names
from remat.documents.trace import Node, Trace
from remat.documents.writes import is_write
from remat.graph import Graph, Operation
from remat.schedule import Schedule
from remat.simulate import simulate

_DROPOUT = "aten.native_dropout_backward.default"
"""The operation that multiplies with dropout's mask: in the backward, and also in the forward (see
`capture.eager_kernels.sampling`)."""
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


def eager_graph(
    trace: Trace, unpacked: Collection[int] = (), regions: Sequence[Sequence[int]] = ()
) -> Graph:
    """Return the graph of a step as Python and autograd free its tensors, for schedules that run
    each operation once. `regions` are the operations of each checkpoint, and `unpacked` the saved
    tensors that hooks of the step unpack, as the hooks of `torch.utils.checkpoint` do."""
    graph = trace.graph()
    # Eager mode overwrites arguments only where autograd adds gradients in place (below), and where
    # the model's code writes into a tensor.
    operations = tuple(
        operation if node is not None and is_write(node) else replace(operation, overwrites=())
        for operation, node in zip(graph.operations, trace.operations, strict=True)
    )
    graph = _with_factors_retained_by_autograd(
        replace(graph, operations=operations), trace, unpacked
    )
    graph = _with_gradients_added_in_place(graph, trace)
    return _with_python_lifetimes(graph, trace, regions)


def _with_python_lifetimes(graph: Graph, trace: Trace, regions: Sequence[Sequence[int]]) -> Graph:
    """Return the graph in which operations read what local variables and autograd hold while they
    run. The forward of a checkpoint holds what it computes until it ends: not autograd."""
    region_of = {op: region for region, ops in enumerate(regions) for op in ops}
    value_of = value_of_storage(trace, graph)
    operations = list(graph.operations)
    for index, node in enumerate(trace.operations):
        if node is None or not node.frees:
            continue
        values = {value_of.get(trace.storage_of.get(name, -1)) for name in node.frees}
        retained = {
            v
            for v in values
            if v is not None and graph.producer[v] < index
            if region_of.get(graph.producer[v]) == region_of.get(index)
        }
        inputs = retained.union(operations[index].inputs)
        operations[index] = replace(operations[index], inputs=tuple(sorted(inputs)))
    return replace(graph, operations=tuple(operations))


def value_of_storage(trace: Trace, graph: Graph) -> dict[int, int]:
    """Return the graph's value of each storage; storages of constant memory have none and are left
    out."""
    index = {value.name: v for v, value in enumerate(graph.values)}
    return {storage: index[name] for name, storage in trace.storage_of.items() if name in index}


@dataclass(frozen=True, slots=True)
class _BackwardFormula:
    """The operations of the backward formula of a product so far, at least one product.

    `gradients` are what all products and bias sums of it read of the backward, `operands` what its
    products read, `results` what all its operations compute, by values. `dtypes` are those of all
    tensors that it reads.
    """

    target: str
    gradients: frozenset[int]
    operands: frozenset[int]
    results: frozenset[int]
    dtypes: frozenset[str]

    def has_product(self, node: Node, read: frozenset[int]) -> bool:
        """True if a node that reads the values `read` of the backward is a further product of this
        formula."""
        return node.target == self.target and bool(self.gradients & read)

    def has_sum_or_cast(self, node: Node, read: frozenset[int]) -> bool:
        """True if a node that reads the values `read` of the backward sums a gradient of this
        formula, for a bias or a broadcast factor, or casts it to the dtype of its factor."""
        if node.target == _SUM:
            return bool((self.gradients | self.results) & read)
        is_cast = node.target == _CAST and node.results[0].tensor.dtype in self.dtypes
        return is_cast and bool(self.results & read)


def _with_factors_retained_by_autograd(
    graph: Graph, trace: Trace, unpacked: Collection[int]
) -> Graph:
    """Return the graph in which the last operation of a backward formula reads what its products
    read: autograd releases their operands only after all gradients of the formula are computed,
    summed where a factor was broadcast, and cast to the factors' dtypes. Saved tensors that hooks
    unpacked are released before these sums and casts."""
    operations = list(graph.operations)
    dtype_of = {p.name: p.tensor.dtype for p in trace.placeholders}
    dtype_of |= {r.name: r.tensor.dtype for node in trace.nodes for r in node.results}
    formula: _BackwardFormula | None = None
    for index, node in enumerate(trace.operations):
        if node is None:
            continue
        inputs = frozenset(graph.operations[index].inputs)
        results = frozenset(graph.operations[index].outputs)
        dtypes = frozenset(dtype_of[name] for name in referenced_names(node.args))
        read = frozenset(v for v in inputs if _is_backward_value(graph, v))
        if formula is not None and formula.has_product(node, read):
            formula = replace(
                formula,
                gradients=formula.gradients & read,
                operands=formula.operands | inputs,
                results=formula.results | results,
                dtypes=formula.dtypes | dtypes,
            )
            inputs = formula.operands
        elif formula is not None and formula.has_sum_or_cast(node, read):
            inputs |= formula.operands.difference(unpacked)
            formula = replace(formula, results=formula.results | results)
        elif node.backward and node.target in _PRODUCTS:
            formula = _BackwardFormula(node.target, read, inputs, results, dtypes)
        else:
            formula = None
        operations[index] = replace(operations[index], inputs=tuple(sorted(inputs)))
    return replace(graph, operations=tuple(operations))


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
        if value is not None and _can_add_in_place(graph, operations[index], value):
            operations[index] = replace(operations[index], overwrites=(value,), recomputable=False)
    return replace(graph, operations=tuple(operations))


def _can_add_in_place(graph: Graph, addition: Operation, value: int) -> bool:
    """True if an addition can write over `value`: a gradient as large as the sum, and not a result
    of the step."""
    size_bytes = sum(graph.values[v].size_bytes for v in addition.outputs)
    return (
        value in addition.inputs
        and value not in graph.results
        and _is_backward_value(graph, value)
        and graph.values[value].size_bytes == size_bytes
    )


def _is_backward_value(graph: Graph, value: int) -> bool:
    return graph.operations[graph.producer[value]].backward
