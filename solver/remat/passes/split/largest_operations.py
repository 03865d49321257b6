"""Splitting the operations that need at least 90% of the memory that the largest needs."""

from __future__ import annotations

from math import inf

from remat.documents.trace import Trace
from remat.passes.split.peak_region import find_peak_region, operand_bytes
from remat.passes.split.rewriting import split_region

_SHARE = 0.9
"""The operations that need at least this share of what the largest needs are split, too: those of
identical layers need the same."""

_MAX_REGIONS = 128


def split_largest_operations(trace: Trace, pieces: int, max_piece_nodes: float = inf) -> Trace:
    """Return the trace with its largest operations in `pieces` pieces, at most one for each row;
    the same trace if they cannot be split. Pieces have no costs yet. A region whose pieces have
    more than `max_piece_nodes` operations and views together is not split."""
    least_bytes = _SHARE * max(operand_bytes(trace.graph_of_sizes), default=0)
    for _ in range(_MAX_REGIONS):
        large = _count_of_large(trace, least_bytes)
        region = find_peak_region(trace, max_piece_nodes / pieces) if large else None
        if region is None:
            break
        smaller = split_region(region, min(pieces, region.rows))
        if _count_of_large(smaller, least_bytes) >= large:
            break
        trace = smaller
    return trace


def _count_of_large(trace: Trace, least_bytes: float) -> int:
    return sum(size >= least_bytes for size in operand_bytes(trace.graph_of_sizes))
