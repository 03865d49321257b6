"""Regions -> `Graph`: the same plain data that the solver, the simulator and all pictures know.

An operation is a region, a value a tensor that its kernel really writes. What is only made and read
inside of a kernel is no value, and running it again there costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from remat.costs.pricing import FLOOR_S
from remat.documents.trace import BOUNDARY
from remat.frontend.compile.joint.fx_utils import (
    elements,
    is_number,
    may_run_again,
    node_bytes,
    read_by,
    source,
    tensors,
)
from remat.frontend.compile.joint.joint_graph import Joint
from remat.frontend.compile.kernels.cost_model import Price
from remat.frontend.compile.kernels.fusion_groups import Region, moved_bytes, reads_of
from remat.frontend.compile.kernels.in_place import read_before_draws, with_overwrites
from remat.graph import Graph, Operation, Value
from remat.limits.outputs import HELD

_FIRST = re.compile(r"[LG]\['\w+'\]\.?")
"""How torch's paths of modules begin: the name of a variable."""

_LONGEST = 60


@dataclass(frozen=True)
class Step:
    """A step to plan. `regions` has the region of each operation of the graph, None for the
    boundary; what a region writes are the operation's outputs, in their order. `held` is what of
    the forward's results its caller holds until the backward ends."""

    graph: Graph
    joint: Joint
    regions: tuple[Region | None, ...]
    held: frozenset[fx.Node]


def read(
    joint: Joint,
    regions: list[Region],
    prices: Callable[[Region, int], Price],
    outputs: str = HELD,
) -> Step:
    """The graph of the step. `prices` says what a region costs that moves so many bytes.

    What the forward returns is held to the end of the backward, unless `outputs` are dropped: then
    until it starts. What comes from outside of the backward (tangents) is held as autograd does.
    """
    values: list[Value] = []
    number: dict[fx.Node, int] = {}

    def add(nodes: tuple[fx.Node, ...]) -> tuple[int, ...]:
        for node in nodes:
            number[node] = len(values)
            values.append(Value(node.name, node_bytes(node)))
        return tuple(number[node] for node in nodes)

    held = joint.held(outputs)
    operations: list[Operation] = []
    of: list[Region | None] = []
    taken: set[str] = {BOUNDARY}
    boundary: int | None = None
    for region in regions:
        if region.is_backward and boundary is None:
            boundary = len(operations)
            still = tuple(sorted(number[n] for n in joint.results - held))
            made = add(joint.tangents)
            start = Operation(BOUNDARY, still, made, 0.0, recomputable=False, backward=True)
            operations.append(start)
            of.append(None)
        inputs = tuple(sorted(number[n] for n in reads_of(region) if n in number))
        made = add(tuple(region.written))
        lasts = joint.mutated.isdisjoint(read_by(region.nodes))
        again = lasts and all(map(may_run_again, region.nodes))
        price = prices(region, moved_bytes(region))
        operations.append(
            Operation(
                name=_name(region, taken),
                inputs=inputs,
                outputs=made,
                cost_s=max(FLOOR_S, price.cost_s),
                workspace_bytes=price.workspace_bytes,
                backward=region.is_backward,
                recomputable=again and bool(made) and not region.is_backward,
                module=_module(region.all_nodes[-1]),
                sequenced=not joint.mutated.isdisjoint(read_by(region.all_nodes)),
            )
        )
        of.append(region)
    # A view of a parameter or of the batch is returned too, and takes nothing here.
    gradients = [source(n) for n in joint.gradients if isinstance(n, fx.Node)]
    brought = [n for n in joint.tangents if n not in joint.passing]
    results = {number[n] for n in (*gradients, *brought) if n in number}
    results |= {number[n] for n in (held if boundary is not None else joint.results)}
    graph = Graph(
        tuple(operations),
        tuple(values),
        frozenset(results),
        joint.given_bytes + joint.copied_bytes,
        boundary,
    )
    over: dict[int, list[int]] = {}
    not_ours = joint.results.union(joint.tangents)
    writer = {node: region for region in regions for node in region.written}
    for made, before in (pair for kernel in joint.kernels or () for pair in kernel.over):
        if made not in writer:
            continue
        first = read_before_draws(made, writer[made])
        for read_now in (before, *writer[made].instead.get(before, ())):
            if read_now in number and read_now not in not_ours and read_now in first:
                over.setdefault(number[made], []).append(number[read_now])
    return Step(with_overwrites(graph, over), joint, tuple(of), held)


def _name(region: Region, taken: set[str]) -> str:
    """For a kernel of several operations what Inductor calls it, without its number, for others
    the node's name; each once."""
    name = region.all_nodes[-1].name
    if region.is_kernel and len(region.all_nodes) > 1:
        made_of = {str(n.meta["original_aten"]) for n in region.all_nodes if _is_named(n)}
        parts = sorted(full.split(".")[1] for full in made_of if "." in full)
        if parts:
            name = "fused_" + "_".join(parts)[:_LONGEST]
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def _is_named(node: fx.Node) -> bool:
    return node.meta.get("original_aten") is not None


def leaving_room(step: Step, budget_bytes: int, saved_bytes: int) -> Graph:
    """The graph with no more than `saved_bytes` held between forward and backward, unless it ends
    in a loss: else other graphs of the step run then, and a share of the memory is theirs. The
    graph itself where nothing is to be left."""
    graph, boundary = step.graph, step.graph.boundary
    outputs = [n for n in step.joint.outputs if isinstance(n, fx.Node) and not is_number(n)]
    if boundary is None or all(elements(t) == 1 for n in outputs for t in tensors(n)):
        return graph
    start = graph.operations[boundary]
    passing_bytes = sum(graph.values[v].size_bytes for v in (*start.inputs, *start.outputs))
    room_bytes = budget_bytes - graph.constant_bytes - passing_bytes - saved_bytes
    if room_bytes <= 0:
        return graph
    start = replace(start, workspace_bytes=room_bytes)
    before, after = graph.operations[:boundary], graph.operations[boundary + 1 :]
    return replace(graph, operations=(*before, start, *after))


def peak_as_inductor_runs(step: Step) -> int:
    """The peak without recomputation, by Inductor's own kernels; 0 where it was not asked."""
    joint = step.joint
    if not joint.observed:
        return 0
    forward, backward = joint.observed
    held = step.held.difference(joint.saved)
    held |= {n for n in joint.tangents if n not in joint.passing}
    held_bytes = sum(map(node_bytes, held))
    return joint.given_bytes + max(
        forward.live_bytes, held_bytes + forward.copied_bytes + backward.live_bytes
    )


def _module(node: fx.Node) -> str:
    """The path of the module that it belongs to, as far as torch tells."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return _FIRST.sub("", str(list(stack.values())[-1][0]), count=1)
