"""Splits of one trace, applied to another of the same model: for other sizes, or by a service."""

from __future__ import annotations

from collections.abc import Iterable

from remat.documents.records import SplitRecord
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.graph import Split
from remat.passes.split.moved_slices import with_moved_slices
from remat.passes.split.regions import Region, TraceIndex, find_region
from remat.passes.split.rewriting import split_regions
from remat.passes.split.states import Rows

AnySplit = Split | SplitRecord


def with_recorded_splits(trace: Trace, splits: Iterable[AnySplit]) -> Trace:
    """Return the trace with the same operations split into as many pieces. Pieces have no costs.

    Raises `RematError` if an operation does not exist, or has fewer rows than pieces, or if splits
    that were made at once have tensors in common.
    """
    groups = _groups_of(splits)
    if groups:
        trace = with_moved_slices(trace)
    for together in groups:
        index = TraceIndex(trace)
        regions = [_region_of(index, split) for split in together]
        trace = split_regions(regions, [split.pieces for split in together])
    return trace


def _groups_of(splits: Iterable[AnySplit]) -> list[list[AnySplit]]:
    """Group the splits that were made at once."""
    groups: list[list[AnySplit]] = []
    for split in splits:
        if split.with_previous and groups:
            groups[-1].append(split)
        else:
            groups.append([split])
    return groups


def _region_of(index: TraceIndex, split: AnySplit) -> Region:
    rows = Rows(split.first_dimension, split.dimension_count)
    tensor = index.trace.tensors.get(split.seed)
    dimensions = 0 if tensor is None else len(tensor.shape)
    exists = split.dimension_count and rows.dimensions.stop <= dimensions
    region = find_region(index, split.seed, rows) if exists else None
    if region is None:
        raise RematError(f"the operations around {split.seed} cannot be split")
    return region
