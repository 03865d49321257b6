"""Checks of a `Trace` as a whole: names, storages, phases, outputs and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.documents.arguments import referenced_names
from remat.documents.structure import check_output_leaves
from remat.documents.targets import ACCUMULATE_TARGET, ARRIVE_TARGET, BOUNDARY_NAME
from remat.documents.writes import check_write, is_write

if TYPE_CHECKING:
    from remat.documents.records import Node
    from remat.documents.trace import Trace


def check_trace(trace: Trace) -> None:
    """Raise ValueError unless every name is unique and defined before it is used, and every storage
    exists."""
    defined: dict[str, int] = {}  # storage by name
    overwritten: set[int] = set()
    arrived: set[str] = set()

    def define(name: str, storage: int) -> None:
        if name in defined or name == BOUNDARY_NAME:
            raise ValueError(f"the name {name} is defined twice")
        if storage >= len(trace.storage_bytes):
            raise ValueError(f"{name} lives in storage {storage}, which does not exist")
        defined[name] = storage

    for placeholder in trace.placeholders:
        define(placeholder.name, placeholder.storage)
    owned_by_caller = {p.storage for p in trace.placeholders}
    owned_by_caller |= {
        trace.storage_of.get(item.name, -1) for item in (*trace.outputs, *trace.gradients)
    }
    node_names = {BOUNDARY_NAME}
    written_storages = {p.storage for p in trace.placeholders}
    backward_names = {p.name for p in trace.placeholders if p.kind == "tangent"}
    forward_storages = {p.storage for p in trace.placeholders if p.kind != "tangent"}
    for node, used in zip(trace.nodes, trace.operands, strict=True):
        if node.name in node_names:
            raise ValueError(f"the operation {node.name} is defined twice")
        node_names.add(node.name)
        if undefined := [name for name in used if name not in defined]:
            raise ValueError(f"operation {node.name} uses {undefined[0]} before it is defined")
        if lost := [name for name in used if defined[name] in overwritten]:
            raise ValueError(f"operation {node.name} reads {lost[0]} after it was overwritten")
        overwritten.update(_checked_overwriting(trace, node, owned_by_caller))
        if not node.backward and (wrong := [name for name in used if name in backward_names]):
            raise ValueError(
                f"operation {node.name} of the forward uses {wrong[0]} of the backward"
            )
        if node.backward:
            backward_names.update(r.name for r in node.results)
        if node.target == ACCUMULATE_TARGET and (len(node.args) != 2 or len(used) != 2):
            raise ValueError(f"operation {node.name} needs a parameter and a gradient")
        if node.target == ARRIVE_TARGET:
            _check_arrival(node, defined, arrived)
            continue
        storages = {r.storage for r in node.results}
        if not node.backward and node.view and not storages <= forward_storages:
            raise ValueError(f"operation {node.name} of the forward views a tensor of the backward")
        if node.view != (bool(storages) and storages <= written_storages):
            raise ValueError(f"operation {node.name} is wrongly marked as view={node.view}")
        if not node.view and storages & written_storages:
            raise ValueError(f"operation {node.name} writes a storage that another one produces")
        written_storages |= storages
        if not node.backward:
            forward_storages |= storages
        for result in node.results:
            define(result.name, result.storage)
        if is_write(node):
            check_write(trace, node)
    tangents = {p.name for p in trace.placeholders if p.kind == "tangent"}
    for output in trace.outputs:
        if output.name not in defined or output.name in backward_names:
            raise ValueError(f"the output {output.name} is not defined in the forward")
        if output.tangent and output.tangent not in tangents:
            raise ValueError(f"{output.tangent} is no tangent")
    for gradient in trace.gradients:
        if gradient.placeholder not in defined or gradient.name not in defined:
            raise ValueError(f"the gradient {gradient.name} is not defined")
    check_output_leaves(trace.result, [store.value for store in trace.stores], len(trace.outputs))


def _check_arrival(node: Node, defined: dict[str, int], arrived: set[str]) -> None:
    """Raise ValueError unless the result is a tensor of the forward that has not arrived before.
    Adds it to `arrived`."""
    match node.results:
        case (result,) if defined.get(result.name) == result.storage and result.name not in arrived:
            if node.backward and not node.recomputable and not node.view:
                arrived.add(result.name)
                return
    raise ValueError(
        f"operation {node.name} of the backward brings back, once, a tensor that the forward made"
    )


def _checked_overwriting(trace: Trace, node: Node, owned_by_caller: set[int]) -> tuple[int, ...]:
    """Return the storages that an operation overwrites. Raises ValueError if the caller has one of
    them."""
    storages = trace.overwritten_storages(node)
    if not storages:
        return ()
    others = (node.args[1:], *node.kwargs.values())
    if any(trace.storage_of[name] in storages for name in referenced_names(others)):
        raise ValueError(f"operation {node.name} reads the tensor that it overwrites")
    if not owned_by_caller.isdisjoint(storages):
        raise ValueError(f"operation {node.name} overwrites a tensor of the caller")
    return storages
