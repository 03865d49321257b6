"""A step that offloads everything: every tensor of the forward that the backward reads leaves the
device."""

from __future__ import annotations

from remat.choice.offloaded_forms import MIN_BYTES
from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.passes.offload.candidates import idle_spans, offloadable_values
from remat.passes.offload.copies_in_graph import HostStay
from remat.passes.offload.copies_in_trace import offload_tensors


def offload_everything(trace: Trace, link: Link) -> Trace:
    """Return the trace with every large tensor of the forward that the backward reads offloaded,
    and freed after its last use there, however long the step waits for the copy."""
    graph = trace.graph()
    stays = [
        HostStay(v, freed_before=span.last_use + 1)
        for v, span in idle_spans(graph, offloadable_values(trace)).items()
        if graph.values[v].size_bytes >= MIN_BYTES
        and span.next_reader is not None
        and not graph.operations[graph.producer[v]].backward
    ]
    return offload_tensors(trace, stays, link)
