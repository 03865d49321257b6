"""Splitting the operations that need at least 90% of the memory that the largest needs."""

from __future__ import annotations

from math import inf

from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.split.moved_slices import with_moved_slices
from remat.passes.split.peak_region import find_peak_region, large_operations, operand_bytes
from remat.passes.split.regions import Region, TraceIndex
from remat.passes.split.rewriting import split_regions

_SHARE = 0.9
"""The operations that need at least this share of what the largest needs are split, too: those of
identical layers need the same."""

_MAX_REGIONS = 128


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
    """Return regions around operations, without tensors in common. The search ends at the first
    operation that cannot be split: the peak stays as large as what that needs."""
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
    """Return the trace with regions split; only the first one if there is no order of the pieces of
    all."""
    numbers = [min(pieces, region.rows) for region in regions]
    try:
        return split_regions(regions, numbers)
    except RematError:
        if len(regions) == 1:
            raise
        return split_regions(regions[:1], numbers[:1])
