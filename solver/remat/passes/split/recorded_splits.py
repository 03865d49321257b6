"""Splits of one trace, applied to another of the same model: for other sizes, or by a service."""

from __future__ import annotations

from collections.abc import Iterable

from remat.documents.records import SplitRecord
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.graph import Split
from remat.passes.split.regions import TraceIndex, find_region
from remat.passes.split.rewriting import split_region
from remat.passes.split.states import Rows


def with_recorded_splits(trace: Trace, splits: Iterable[Split | SplitRecord]) -> Trace:
    """Return the trace with the same operations split into as many pieces. Pieces have no costs.

    Raises `RematError` if an operation does not exist, or has fewer rows than pieces.
    """
    for split in splits:
        rows = Rows(split.first_dimension, split.dimension_count)
        tensor = trace.tensors.get(split.seed)
        dimensions = 0 if tensor is None else len(tensor.shape)
        exists = split.dimension_count and rows.dimensions.stop <= dimensions
        region = find_region(TraceIndex(trace), split.seed, rows) if exists else None
        if region is None:
            raise RematError(f"the operations around {split.seed} cannot be split")
        trace = split_region(region, split.pieces)
    return trace
