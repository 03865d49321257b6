"""Costs of the pieces of split operations, for the traces of files."""

from __future__ import annotations

from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace


def with_costs_of_pieces(trace: Trace) -> Trace:
    """Return a trace with costs of its pieces, from the source of the others' costs."""
    source = next((node.cost_source for node in trace.nodes if node.cost_source), "")
    method, _, device = source.partition(" ")
    if method == "roofline":
        return with_roofline_costs(trace, Roofline(device))
    from remat.frontend.costs.measure import measure_pieces

    return measure_pieces(trace)
