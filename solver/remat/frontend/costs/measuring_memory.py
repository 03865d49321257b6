"""Memory limits for measuring, so that planning needs no more memory than the planned step.

A measurement runs one operation on copies of its operands. Of the step, only the model's parameters
and the batch are in memory meanwhile.
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

    The total is at most the budget, or the peak with each repeated block checkpointed, whichever is
    larger. For the budget "min" (`budget_bytes` is None), a lower bound of the peak replaces the
    budget.
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
    """Return the bytes that measuring a block may take in addition to its parameters: its peak
    without recomputation, which is also its peak when it is checkpointed as a whole."""
    graph = trace.graph_of_sizes
    inputs = {p.storage for p in trace.placeholders if p.kind == "input"}
    inputs_bytes = sum(map(trace.allocated_bytes, inputs))
    return max(0, baseline_of(graph).peak_bytes - graph.constant_bytes + inputs_bytes)
