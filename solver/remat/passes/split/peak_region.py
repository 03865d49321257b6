"""The region to split for an operation that needs too much memory: around its largest tensor.

No schedule has a smaller peak than the inputs and outputs of one operation, so the operation that
needs the most is what recomputation alone cannot pass.
"""

from __future__ import annotations

from math import inf, prod

from remat.graph import Graph
from remat.passes.split.regions import Region, TraceIndex, find_region
from remat.passes.split.stages import split_bytes
from remat.passes.split.states import PartialSum, candidate_rows

_MAX_SEEDS = 4
"""The number of tensors of the operation, largest first, that are tried."""


def find_peak_region(index: TraceIndex, operation: int, max_nodes: float = inf) -> Region | None:
    """Return the region whose tensors are the largest part of what an operation of the graph needs;
    None if it cannot be split, or only with more than `max_nodes` operations and views.

    Of all ways to count rows, it is the one that leaves the fewest bytes whole; of those that leave
    as many, the one that adds up the fewest elements in the forward, whose other values are then
    equal bit for bit; then the one with the most rows.
    """
    graph = index.trace.graph_of_sizes
    values = graph.values
    operands = {*graph.operations[operation].inputs, *graph.operations[operation].outputs}
    by_size = sorted(operands, key=lambda v: -values[v].size_bytes)
    for value in by_size[:_MAX_SEEDS]:
        regions = _regions_around(index, values[value].name, max_nodes)
        best = max(regions, key=_preference, default=None)
        if best is not None and split_bytes(best):
            return best
    return None


def _preference(region: Region) -> tuple[int, int, int]:
    """Return the sort key of a region; the largest is the best."""
    nodes = region.trace.nodes
    forward_sums = (
        prod(result.tensor.shape)
        for index, call in region.split_calls.items()
        if not nodes[index].backward
        for result, state in zip(nodes[index].results, call.results, strict=True)
        if isinstance(state, PartialSum)
    )
    return split_bytes(region), -sum(forward_sums), region.rows


def large_operations(graph: Graph, least_bytes: float) -> list[int]:
    """Return the operations that need at least so much memory, those that need the most first."""
    needs_bytes = operand_bytes(graph)
    large = [op for op, size_bytes in enumerate(needs_bytes) if size_bytes >= least_bytes]
    return sorted(large, key=lambda op: -needs_bytes[op])


def operand_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the inputs, outputs and workspace of each operation together."""
    return [
        sum(graph.values[v].size_bytes for v in operation.inputs) + produced_bytes
        for operation, produced_bytes in zip(graph.operations, graph.produced_bytes, strict=True)
    ]


def _regions_around(index: TraceIndex, name: str, max_nodes: float) -> list[Region]:
    """Return a region around a tensor for each number of rows that it can have."""
    if name not in index.producer:  # a tangent
        return []
    shape = index.trace.tensors[name].shape
    sizes = {prod(shape[i:j]) for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)}
    states = [state for rows in sizes if rows > 1 for state in candidate_rows(shape, rows)]
    regions = (find_region(index, name, state, max_nodes) for state in states)
    return [region for region in regions if region is not None]
