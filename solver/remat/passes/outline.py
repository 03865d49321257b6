"""What two traces have in common: names are those of a capture, and mean nothing beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from remat.documents.arguments import Argument, refs, rename
from remat.documents.records import Node
from remat.documents.trace import Trace

SLICE, ALIAS = "aten.slice.Tensor", "aten.alias.default"


def outline(trace: Trace) -> tuple[object, ...]:
    """Equal for traces of the same operations on the same values, whatever their sizes. Which view
    a view is means nothing to a schedule."""
    numbers = _numbers(trace)
    nodes = tuple(
        ("" if n.view else n.target, n.backward, tuple(numbers[r] for r in _reads(n)))
        for n in trace.nodes
    )
    tangents = tuple(bool(o.tangent) for o in trace.outputs)
    return nodes, len(trace.storages), tangents, trace.accumulating


def is_same_step(one: Trace, other: Trace) -> bool:
    """Whether two traces are equal but for names, and labels of modules."""
    return all(a == b for a, b in zip_longest(_records(one), _records(other)))


def _records(trace: Trace) -> Iterator[object]:
    """All of a trace, piece by piece, with numbers for names."""
    numbers = _numbers(trace)

    def name_of(name: str) -> str:
        return str(numbers[name])

    def arguments(argument: Argument) -> Argument:
        return rename(argument, name_of)

    for p in trace.placeholders:
        yield p.model_copy(update={"name": name_of(p.name)})
    looks = {p.name: p.tensor for p in trace.placeholders}
    for n in trace.nodes:
        looks.update((r.name, r.tensor) for r in n.results)
        if (
            n.view
            and n.target == SLICE
            and [looks[r] for r in _reads(n)] == [r.tensor for r in n.results]
        ):
            n = n.model_copy(update={"target": ALIAS, "args": n.args[:1]})  # of everything
        yield n.model_copy(
            update={
                "name": "",
                "module": "",
                "args": tuple(map(arguments, n.args)),
                "kwargs": {key: arguments(item) for key, item in n.kwargs.items()},
                "results": tuple(r.model_copy(update={"name": name_of(r.name)}) for r in n.results),
            }
        )
    for o in trace.outputs:
        yield name_of(o.name), o.differentiable, o.tangent and name_of(o.tangent)
    for g in trace.gradients:
        yield name_of(g.placeholder), name_of(g.name)
    told = {"placeholders", "nodes", "outputs", "gradients"}
    yield [getattr(trace, field) for field in type(trace).model_fields if field not in told]


def _numbers(trace: Trace) -> dict[str, int]:
    """Each tensor by when it is there."""
    names = [p.name for p in trace.placeholders]
    names += [r.name for n in trace.nodes for r in n.results]
    return {name: number for number, name in enumerate(names)}


def _reads(node: Node) -> Iterator[str]:
    return refs((node.args, *node.kwargs.values()))
