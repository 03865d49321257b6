"""What holds the memory at the peak of a schedule, in a sentence."""

from __future__ import annotations

from remat.graph import Graph
from remat.limits.units import format_bytes
from remat.schedule import Schedule
from remat.simulate import simulate

_NAMED = 3


def held_at_peak(graph: Graph, schedule: Schedule) -> str:
    """Where the peak is, what it is made of, and the largest of what is held there, by name."""
    timeline = simulate(graph, schedule)
    run = timeline.peak_run
    operation = graph.operations[schedule.runs[run]]
    own = {*operation.inputs, *operation.outputs}
    live = [copy for copy in timeline.copies if copy.start <= run <= copy.end]
    results = [c.value for c in live if c.value not in own and c.end >= len(schedule)]
    kept = [c.value for c in live if c.value not in own and c.end < len(schedule)]
    beside_bytes = graph.constant_bytes + sum(graph.values[v].size_bytes for v in results + kept)
    parts = {
        "parameters, buffers and batch": graph.constant_bytes,
        "what this operation reads and writes": timeline.peak_bytes - beside_bytes,
        "gradients and outputs": sum(graph.values[v].size_bytes for v in results),
        "what is kept for later": sum(graph.values[v].size_bytes for v in kept),
    }
    told = ", ".join(f"{format_bytes(size)} {what}" for what, size in parts.items() if size)
    sizes = {v: graph.values[v].size_bytes for v in {*own, *results, *kept}}
    largest = sorted(sizes, key=lambda v: (-sizes[v], v))[:_NAMED]
    named = ", ".join(f"{format_bytes(sizes[v])} of {_name(graph, v)}" for v in largest)
    where = "backward" if operation.backward else "forward"
    module = f", {operation.module}" if operation.module else ""
    return (
        f"the peak of {format_bytes(timeline.peak_bytes)} is in {operation.name} ({where}{module}):"
        f" {told}; the largest are {named}"
    )


def _name(graph: Graph, value: int) -> str:
    maker = graph.operations[graph.producer[value]]
    return f"{maker.name} ({maker.module})" if maker.module else maker.name
