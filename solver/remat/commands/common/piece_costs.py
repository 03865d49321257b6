"""Costs of the pieces of split operations, for the traces of files."""

from __future__ import annotations

from remat.costs.trace_costs import roofline_of, with_roofline_costs
from remat.documents.trace import Trace


def with_costs_of_pieces(trace: Trace) -> Trace:
    """Return a trace with costs of its pieces, from the source of the others' costs."""
    if (roofline := roofline_of(trace)) is not None:
        return with_roofline_costs(trace, roofline)
    from remat.frontend.costs.measure import measure_pieces

    return measure_pieces(trace)
