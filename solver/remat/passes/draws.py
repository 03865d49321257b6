"""Random numbers that are drawn once, as a rewriting of the Trace.

A schedule may run a random operation again, under the generator's state of its first run. Where
that state cannot be had (inside a CUDA graph capture), what was drawn is kept instead.
"""

from __future__ import annotations

from remat.documents.trace import Trace


def drawn_once(trace: Trace) -> Trace:
    """The same step in which no operation that draws random numbers may run again."""
    nodes = tuple(
        node.model_copy(update={"recomputable": False}) if node.seeded else node
        for node in trace.nodes
    )
    return trace.replace(nodes=nodes)
