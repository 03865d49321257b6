"""Memory that measuring may take: planning needs no more memory than the step that it plans.

A measurement runs one operation on copies of its operands, while the model's parameters and the
batch are in memory, and nothing else of the step.
"""

from __future__ import annotations

from remat.documents.trace import Trace
from remat.errors import RematError
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.simulate import baseline_of, peak_and_time
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import checkpoint_segments


def step_limit_bytes(trace: Trace, budget_bytes: int | None) -> int:
    """Return the bytes that measuring a step may take in addition to its constant memory.

    The total is at most the budget or what the step takes with each repeated block checkpointed,
    whichever is larger. For the budget "min", which is None here, the first is what the largest
    operation takes.
    """
    graph = trace.graph_of_sizes
    peaks_bytes = [peak_lower_bound_bytes(graph) if budget_bytes is None else budget_bytes]
    try:
        if blocks := find_blocks(graph):
            checkpointed = checkpoint_segments(graph, blocks)
            peaks_bytes.append(peak_and_time(graph, checkpointed)[0])
    except RematError:  # a block that cannot be recomputed
        pass
    return max(0, max(peaks_bytes) - graph.constant_bytes)


def block_limit_bytes(trace: Trace) -> int:
    """Return the bytes that measuring a block may take in addition to its parameters: those that it
    takes without recomputation, as when it is checkpointed as a whole."""
    graph = trace.graph_of_sizes
    inputs = {p.storage for p in trace.placeholders if p.kind == "input"}
    inputs_bytes = sum(map(trace.allocated_bytes, inputs))
    return max(0, baseline_of(graph).peak_bytes - graph.constant_bytes + inputs_bytes)
