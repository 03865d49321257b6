"""A step that offloads everything: every tensor that the backward reads leaves the device."""

from __future__ import annotations

from remat.choice.offloaded_forms import MIN_BYTES
from remat.costs.link import Link
from remat.documents.trace import Trace
from remat.passes.offload.candidates import offload_candidates
from remat.passes.offload.places import HostStay
from remat.passes.offload.rewriting import offload_tensors


def offload_everything(trace: Trace, link: Link) -> Trace:
    """Return the trace with every large tensor that the backward reads offloaded, and freed after
    its last use in the forward, however long the step waits for the copy."""
    stays = [
        HostStay(c.tensor, gone_by=trace.nodes[c.last_forward_reader + 1].name)
        for c in offload_candidates(trace)
        if c.size_bytes >= MIN_BYTES and c.first_backward_reader is not None
    ]
    return offload_tensors(trace, stays, link)
