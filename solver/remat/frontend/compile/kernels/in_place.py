"""In-place writes: the inputs whose memory a backward operation may write its outputs into.

Inductor may write an output into the memory of an input of the same size that is read for the last
time. The graph names at most one such input for each output, the one that most surely dies there.
Whether it does depends on the schedule, and `remat.simulate` counts the memory accordingly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.joint.fx_utils import is_reduction, is_seeded_random, node_bytes
from remat.frontend.compile.kernels.fusion_groups import FusionGroup, tensors_read
from remat.graph import Graph


def with_overwrites(graph: Graph, in_place_inputs: Mapping[int, Sequence[int]]) -> Graph:
    """Return the graph with `overwrites` set for its backward operations. `in_place_inputs` has,
    for an output, the inputs into whose memory it may be written."""
    operations = list(graph.operations)
    for op, operation in enumerate(operations):
        if operation.recomputable or not operation.backward:
            continue
        dying = {v for v in operation.inputs if v not in graph.results and _last(graph, v) == op}
        overwritten: list[int] = []
        for output in operation.outputs:
            size_bytes = graph.values[output].size_bytes
            inputs = in_place_inputs.get(output, ())
            fitting = [v for v in inputs if graph.values[v].size_bytes == size_bytes]
            # Prefer values of the backward: no later recomputation needs these.
            fitting.sort(key=lambda v: not graph.operations[graph.producer[v]].backward)
            if (first := next((v for v in fitting if v in dying), None)) is not None:
                dying.remove(first)
                overwritten.append(first)
        operations[op] = replace(operation, overwrites=tuple(sorted(overwritten)))
    return replace(graph, operations=tuple(operations))


def with_separate_buffers(graph: Graph, separate_buffers: Collection[str]) -> Graph:
    """Return the graph in which the values with these names have memory of their own: the
    operations that write them overwrite no input (their `overwrites` are empty)."""
    operations = (
        replace(operation, overwrites=())
        if any(graph.values[output].name in separate_buffers for output in operation.outputs)
        else operation
        for operation in graph.operations
    )
    return replace(graph, operations=tuple(operations))


def overwritable_tensors(output: fx.Node, group: FusionGroup) -> set[fx.Node]:
    """Return the tensors of a group into whose memory Inductor may write `output`.

    Inductor takes the memory of the input that is read first. It counts random numbers that the
    kernel generates as an input, which has no memory of its own. So only tensors that the loop of
    `output` reads before a random operation of the same size qualify; without such an operation,
    all that the group reads.
    """
    inside = set(group.nodes)
    if not any(is_seeded_random(n) and node_bytes(n) == node_bytes(output) for n in inside):
        return tensors_read(group)
    read_first: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [output]
    while pending:
        node = storage_base(pending.pop())
        if node in seen:
            continue
        seen.add(node)
        read = group.recomputed_copies.get(node, node)
        operation = producer(read)
        if operation not in inside:
            read_first.add(read)
        elif is_seeded_random(operation) and node_bytes(operation) == node_bytes(output):
            break
        elif not is_reduction(operation):  # another loop reads the inputs of reductions
            pending += reversed(operation.all_input_nodes)
    return read_first


def _last(graph: Graph, value: int) -> int:
    """Return the last reader of a value that runs once (these keep their order), or -1."""
    consumers = graph.consumers[value]
    return max((op for op in consumers if not graph.operations[op].recomputable), default=-1)
