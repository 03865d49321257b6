"""Splits of a trace: the operations that need the most memory, or the splits of another trace.

No schedule has a smaller peak than the inputs and outputs of one operation, so the operation that
needs the most is what recomputation alone cannot pass. It is split together with the operations
around its largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod

from remat.documents.records import SplitRecord
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.graph import Graph, Split
from remat.passes.split.moved_slices import with_moved_slices
from remat.passes.split.regions import Region, TraceIndex, find_region
from remat.passes.split.rewriting import split_regions
from remat.passes.split.rules import RESHAPES
from remat.passes.split.stages import split_bytes
from remat.passes.split.states import PartialSum, Rows, candidate_rows

_SHARE = 0.9
"""Operations that need at least this share of the largest one's memory are split, too: identical
layers need the same."""

_MAX_REGIONS = 128

_MAX_SEEDS = 4
"""The number of tensors of the operation, largest first, that are tried."""

AnySplit = Split | SplitRecord


def split_largest_operations(trace: Trace, pieces: int, max_piece_nodes: float = inf) -> Trace:
    """Return the trace with its largest operations in `pieces` pieces, at most one for each row;
    the same trace if they cannot be split. Pieces have no costs yet. A region whose pieces have
    more than `max_piece_nodes` operations and views together is not split."""
    original, trace = trace, with_moved_slices(trace)
    moved = trace
    least_bytes = _SHARE * max(operand_bytes(trace.graph_of_sizes), default=0)
    large = large_operations(trace.graph_of_sizes, least_bytes)
    count = 0
    while large and count < _MAX_REGIONS:
        regions = _separate_regions(trace, large, max_piece_nodes / pieces)[: _MAX_REGIONS - count]
        if not regions:
            break
        for attempted in (regions, regions[:1])[: len(regions)]:
            smaller = _split_at_once(attempted, pieces)
            still_large = large_operations(smaller.graph_of_sizes, least_bytes)
            if len(still_large) < len(large):
                trace, large, count = smaller, still_large, count + len(attempted)
                break
        else:
            break
    return original if trace is moved else trace


def _separate_regions(trace: Trace, operations: list[int], max_nodes: float) -> list[Region]:
    """Return regions around these operations that have no tensors in common. It ends at the first
    operation that cannot be split, or only with more than `max_nodes` operations and views: the
    peak stays as large as what that operation needs."""
    index = TraceIndex(trace)
    graph = trace.graph_of_sizes
    regions: list[Region] = []
    in_regions: set[str] = set()
    for op in operations:
        if graph.operations[op].name in in_regions:
            continue
        region = find_peak_region(index, op, max_nodes)
        if region is None:
            break
        if any(region.depends_on(other) or other.depends_on(region) for other in regions):
            continue  # a later search, among the pieces of the others, finds it
        regions.append(region)
        in_regions.update(trace.nodes[i].name for i in region.split_calls)
    return regions


def _split_at_once(regions: list[Region], pieces: int) -> Trace:
    """Return the trace with these regions in `pieces` pieces, or as many as they have rows. Only
    the first region is split if the pieces of all have no valid order."""
    numbers = [min(pieces, region.rows) for region in regions]
    try:
        return split_regions(regions, numbers)
    except RematError:
        if len(regions) == 1:
            raise
        return split_regions(regions[:1], numbers[:1])


# -- the region around one operation ---------------------------------------------------------------


def find_peak_region(index: TraceIndex, operation: int, max_nodes: float = inf) -> Region | None:
    """Return the region whose tensors are the largest part of what an operation of the graph needs;
    None if it cannot be split, or only with more than `max_nodes` operations and views. The
    region contains the operation, which would otherwise read the tensors whole.

    Of the regions with other dimensions as rows, it is the one that leaves the fewest bytes whole;
    then the one that adds up the fewest elements in the forward, since sums over pieces are rounded
    differently; then the one with the most rows.
    """
    graph = index.trace.graph_of_sizes
    node = index.nodes_by_name.get(graph.operations[operation].name)
    if node is None:  # the start of the backward is no node of the trace
        return None
    if index.trace.nodes[node].piece_of:
        return None
    values = graph.values
    operands = {*graph.operations[operation].inputs, *graph.operations[operation].outputs}
    by_size = sorted(operands, key=lambda v: -values[v].size_bytes)
    for value in by_size[:_MAX_SEEDS]:
        regions = _regions_around(index, values[value].name, max_nodes)
        regions = [region for region in regions if node in region.split_calls]
        best = max(regions, key=_region_preference, default=None)
        if best is not None and split_bytes(best):
            return best
    return None


def _region_preference(region: Region) -> tuple[int, int, int]:
    """Return the sort key of a region, the largest the best: bytes that are split, fewest elements
    that the forward sums up, rows."""
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
    """Return the operations that need at least so much memory, the largest first."""
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
    """Return a region around a tensor for each number of rows that it can have, itself or reshaped:
    a row of the logits of 8 x 16 tokens is a token, or a sequence."""
    if name not in index.producer:  # a tangent
        return []
    readers = (index.trace.nodes[reader] for reader in index.consumers.get(name, ()))
    reshaped = [node.results[0].name for node in readers if node.view and node.target in RESHAPES]
    regions: list[Region] = []
    tried: dict[int, int] = {}
    for seed in (name, *reshaped):
        shape = index.trace.tensors[seed].shape
        sizes = {prod(shape[i:j]) for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)}
        states: list[Rows] = []
        for rows in sizes - {1}:
            candidates = list(candidate_rows(shape, rows))
            if len(candidates) > tried.get(rows, 0):  # two dimensions may have the same size
                states += candidates
                tried[rows] = len(candidates)
        regions_of_seed = (find_region(index, seed, state, max_nodes) for state in states)
        regions += [region for region in regions_of_seed if region is not None]
    return regions


# -- splits of another trace -----------------------------------------------------------------------


def with_recorded_splits(trace: Trace, splits: Iterable[AnySplit]) -> Trace:
    """Return the trace with the same operations split into as many pieces. Pieces have no costs.

    Raises `RematError` if an operation does not exist, or has fewer rows than pieces, or if splits
    that were made at once have tensors in common.
    """
    groups = _splits_made_at_once(splits)
    if groups:
        trace = with_moved_slices(trace)
    for together in groups:
        index = TraceIndex(trace)
        regions = [_recorded_region(index, split) for split in together]
        trace = split_regions(regions, [split.pieces for split in together])
    return trace


def _splits_made_at_once(splits: Iterable[AnySplit]) -> list[list[AnySplit]]:
    """Return the splits in groups that were made at once."""
    groups: list[list[AnySplit]] = []
    for split in splits:
        if split.with_previous and groups:
            groups[-1].append(split)
        else:
            groups.append([split])
    return groups


def _recorded_region(index: TraceIndex, split: AnySplit) -> Region:
    """Return the region of a recorded split in this trace. Raises `RematError` if it has none."""
    rows = Rows(split.first_dimension, split.dimension_count)
    tensor = index.trace.tensors.get(split.seed)
    shape = () if tensor is None else tensor.shape
    exists = split.dimension_count and rows.dimensions.stop <= len(shape)
    region = find_region(index, split.seed, rows) if exists else None
    if region is None:
        raise RematError(f"the operations around {split.seed} cannot be split")
    return region
