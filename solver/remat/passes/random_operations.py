"""A pass that forbids a schedule to recompute random operations.

By default a schedule may recompute a random operation under the RNG state of its first run. Where
that state cannot be read (inside a CUDA graph capture), the results must be retained instead.
"""

from __future__ import annotations

from remat.documents.trace import Trace


def without_random_recomputation(trace: Trace) -> Trace:
    """Return the same step, with its random operations marked as not recomputable."""
    nodes = tuple(
        node.model_copy(update={"recomputable": False}) if node.random else node
        for node in trace.nodes
    )
    return trace.replace(nodes=nodes)
