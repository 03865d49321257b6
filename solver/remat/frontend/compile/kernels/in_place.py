"""Which inputs an operation of the backward may write over, in the graph that is planned.

A compiler may write an output over an input of its size that nobody reads any more. For each output
one such input is named, that most surely dies there; whether it does is up to the schedule, and
`remat.simulate` counts it so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from remat.frontend.compile.joint.fx_utils import is_draw, is_sum, maker, node_bytes, source
from remat.frontend.compile.kernels.fusion_groups import Region, reads_of
from remat.graph import Graph


def with_overwrites(graph: Graph, over: Mapping[int, Sequence[int]]) -> Graph:
    """The graph with `overwrites`. `over` has for a value those that it may be written over."""
    operations = list(graph.operations)
    for op, operation in enumerate(operations):
        if operation.recomputable or not operation.backward:
            continue
        free = {v for v in operation.inputs if v not in graph.results and _last(graph, v) == op}
        chosen: list[int] = []
        for made in operation.outputs:
            size_bytes = graph.values[made].size_bytes
            fitting = [v for v in over.get(made, ()) if graph.values[v].size_bytes == size_bytes]
            # What the backward made is not wanted to make anything else again.
            fitting.sort(key=lambda v: not graph.operations[graph.producer[v]].backward)
            if (first := next((v for v in fitting if v in free), None)) is not None:
                free.remove(first)
                chosen.append(first)
        operations[op] = replace(operation, overwrites=tuple(sorted(chosen)))
    return replace(graph, operations=tuple(operations))


def without_overwrites(graph: Graph, apart: Collection[str]) -> Graph:
    """The graph in which operations with an output `apart`, by name, write over nothing."""
    operations = (
        replace(operation, overwrites=())
        if any(graph.values[made].name in apart for made in operation.outputs)
        else operation
        for operation in graph.operations
    )
    return replace(graph, operations=tuple(operations))


def read_before_draws(made: fx.Node, region: Region) -> set[fx.Node]:
    """What may be written over by this. Inductor takes what is read first, and random numbers that
    a kernel draws count as read: their memory is there for nothing else. Without such, all that
    the kernel reads."""
    inside = set(region.nodes)
    if not any(is_draw(n) and node_bytes(n) == node_bytes(made) for n in inside):
        return reads_of(region)
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = [made]
    while waiting:
        node = source(waiting.pop())
        if node in seen:
            continue
        seen.add(node)
        read = region.anew.get(node, node)
        call = maker(read)
        if call not in inside:
            found.add(read)
        elif is_draw(call) and node_bytes(call) == node_bytes(made):
            break
        elif not is_sum(call):  # what sums read, another loop does
            waiting += reversed(call.all_input_nodes)
    return found


def _last(graph: Graph, value: int) -> int:
    """The last that reads it and runs once: these keep their order."""
    users = graph.consumers[value]
    return max((op for op in users if not graph.operations[op].recomputable), default=-1)
