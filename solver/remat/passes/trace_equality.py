"""Comparison of traces, without the names of tensors and modules, which differ between captures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from remat.documents.trace import Trace

SLICE, ALIAS = "aten.slice.Tensor", "aten.alias.default"


def topology_key(trace: Trace) -> tuple[object, ...]:
    """Return a key that is equal for traces with the same operations and data flow, whatever their
    sizes. The kind of a view is not part of it, since a schedule does not depend on that."""
    numbers = _tensor_numbers(trace)
    nodes = tuple(
        ("" if n.view else n.target, n.backward, tuple(numbers[r] for r in n.operand_names))
        for n in trace.nodes
    )
    tangents = tuple(bool(o.tangent) for o in trace.outputs)
    return nodes, len(trace.storage_bytes), tangents, trace.accumulates_gradients


def is_same_except_names(one: Trace, other: Trace) -> bool:
    """True if two traces are equal except for the names of tensors and modules."""
    return all(a == b for a, b in zip_longest(_unnamed_records(one), _unnamed_records(other)))


def _unnamed_records(trace: Trace) -> Iterator[object]:
    """Yield all records of a trace, with numbers in place of names."""
    numbers = {name: str(number) for name, number in _tensor_numbers(trace).items()}
    for p in trace.placeholders:
        yield p.model_copy(update={"name": numbers[p.name]})
    metas = {p.name: p.tensor for p in trace.placeholders}
    for n in trace.nodes:
        metas.update((r.name, r.tensor) for r in n.results)
        if (
            n.view
            and n.target == SLICE
            and [metas[r] for r in n.operand_names] == [r.tensor for r in n.results]
        ):  # a slice of the whole tensor
            n = n.model_copy(update={"target": ALIAS, "args": n.args[:1]})
        results = tuple(r.model_copy(update={"name": numbers[r.name]}) for r in n.results)
        yield n.with_operands(numbers, name="", module="", results=results)
    for o in trace.outputs:
        yield numbers[o.name], o.differentiable, o.tangent and numbers[o.tangent]
    for g in trace.gradients:
        yield numbers[g.placeholder], numbers[g.name], g.sources
    named_fields = {"placeholders", "nodes", "outputs", "gradients"}
    yield [getattr(trace, field) for field in type(trace).model_fields if field not in named_fields]


def _tensor_numbers(trace: Trace) -> dict[str, int]:
    """Number the tensors of a trace in the order in which they are produced, inputs first."""
    names = [p.name for p in trace.placeholders]
    names += [r.name for n in trace.nodes for r in n.results]
    return {name: number for number, name in enumerate(names)}
