"""Offload tensors of a trace, with copies at the places that `places` selects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.passes.offload.candidates import offload_candidates
from remat.passes.offload.copies_in_trace import forward_first, insert_copies
from remat.passes.offload.places import HostStay, TimedOperation, copy_places


def offload_tensors(
    trace: Trace,
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
) -> Trace:
    """Return the trace in which these tensors are offloaded; the costs of its operations decide
    where copies start and end.

    `recomputed_s` are seconds of recomputation that are expected before operations. A tensor that
    is needed before its copy to the host has ended stays on the device. Raises `RematError` for a
    tensor that is not one of `offload_candidates(trace)`, or that nothing needs, and `KeyError` for
    an unknown operation.
    """
    trace = forward_first(trace)
    operations = [
        TimedOperation(node.name, 0.0 if node.view else node.cost_s or 0.0) for node in trace.nodes
    ]
    first_backward = next(i for i, node in enumerate(trace.nodes) if node.backward)
    candidates = offload_candidates(trace)
    places = copy_places(operations, first_backward, candidates, stays, link, recomputed_s)
    return insert_copies(trace, places)
