"""A step that offloads everything: every tensor of the forward that the backward reads leaves the
device."""

from __future__ import annotations

from remat.choice.offloaded_forms import MIN_BYTES
from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.passes.offload.candidates import offload_candidates
from remat.passes.offload.places import HostStay
from remat.passes.offload.rewriting import offload_tensors


def offload_everything(trace: Trace, link: Link) -> Trace:
    """Return the trace with every large tensor of the forward that the backward reads offloaded,
    and freed after its last use there, however long the step waits for the copy."""
    stays = [
        HostStay(c.tensor, gone_by=trace.nodes[c.idle.last_use + 1].name)
        for c in offload_candidates(trace)
        if c.size_bytes >= MIN_BYTES
        and c.idle.next_reader is not None
        and not trace.nodes[c.producer].backward
    ]
    return offload_tensors(trace, stays, link)
