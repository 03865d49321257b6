"""`TrainingMemory`: the memory of a training loop with its optimizer, and the parts of its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.allocator.prediction import is_on_cuda, step_allocation_events
from remat.allocator.replay import AllocationEvent, AllocatorPeaks, replay_events
from remat.costs.optimizer_memory import OptimizerMemory
from remat.documents.trace import Trace, accumulated_gradient_bytes
from remat.graph import Graph
from remat.report.eager_step import value_of_storage
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Peaks in bytes of a training loop from its first step on.

    `peak_bytes` is the largest sum of tensors that are live at once; `allocated_bytes` and
    `reserved_bytes` are what torch's allocator will report on CUDA, with default segments, and
    `expandable_bytes` what it reserves with expandable segments. On other devices all are equal.
    `parts` are the parts of the peak, by name. `is_in_optimizer` is True if the peak is in
    `optimizer.step()`.
    """

    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    expandable_bytes: int
    is_in_optimizer: bool
    parts: dict[str, int]

    @classmethod
    def of(
        cls, trace: Trace, graph: Graph, schedule: Schedule, optimizer: OptimizerMemory
    ) -> TrainingMemory:
        """Return the memory of the steps of a trace. `graph` is the trace's, or eager mode's
        (`eager_graph`)."""
        timeline = simulate(graph, schedule)
        step_bytes = timeline.peak_bytes + optimizer.state_bytes
        is_in_optimizer = optimizer_step_bytes(graph, optimizer) > step_bytes
        parts = _peak_parts_bytes(trace, graph, timeline, is_in_optimizer=is_in_optimizer)
        parts["optimizer state"] = optimizer.state_bytes
        parts["optimizer step"] = optimizer.temporary_bytes if is_in_optimizer else 0
        events = list(step_allocation_events(trace, schedule, graph=graph, optimizer=optimizer))
        default = replay_events(events)
        if not is_on_cuda(trace):
            requested = default.requested_bytes
            default = expandable = AllocatorPeaks(requested, requested, requested)
        else:
            expandable = replay_events(events, is_expandable=True)
        return cls(
            default.requested_bytes,
            default.allocated_bytes,
            default.reserved_bytes,
            expandable.reserved_bytes,
            is_in_optimizer,
            {name: size for name, size in parts.items() if size},
        )


_SIZE_FACTORS = (0.97, 0.985, 1.015, 1.03)
"""Factors of the sizes of a step's tensors, for the range of reserved bytes."""


def reserved_range(
    trace: Trace, graph: Graph, schedule: Schedule, optimizer: OptimizerMemory
) -> tuple[float, float]:
    """Return the smallest and the largest ratio of what torch's allocator reserves to the peak, in
    loops whose tensors of the step are up to 3% smaller or larger.

    Whether a tensor fits into a free block depends on all sizes before it, so a few tokens more may
    change what is reserved by segments of several GiB.
    """
    events = list(step_allocation_events(trace, schedule, graph=graph, optimizer=optimizer))
    ratios = []
    for factor in (1.0, *_SIZE_FACTORS):
        peaks = replay_events(_with_scaled_step(events, factor))
        ratios.append(peaks.reserved_bytes / max(1, peaks.requested_bytes))
    return min(ratios), max(ratios)


def _with_scaled_step(
    events: Sequence[AllocationEvent], factor: float
) -> Iterator[AllocationEvent]:
    """Yield events with other sizes of the tensors that a step allocates; their keys are pairs of a
    step and a number."""
    for event in events:
        is_of_step = isinstance(event.key, tuple) and isinstance(event.key[0], int)
        if event.size_bytes is None or not is_of_step:
            yield event
        else:
            yield event._replace(size_bytes=int(event.size_bytes * factor))


def optimizer_step_bytes(graph: Graph, optimizer: OptimizerMemory) -> int:
    """Return the bytes that are live while the optimizer's step runs: constant memory, results of
    the training step, the state and temporary tensors of the optimizer."""
    results_bytes = sum(graph.values[v].size_bytes for v in graph.results)
    return graph.constant_bytes + results_bytes + optimizer.state_bytes + optimizer.temporary_bytes


def _peak_parts_bytes(
    trace: Trace, graph: Graph, timeline: Timeline, *, is_in_optimizer: bool
) -> dict[str, int]:
    """Return the bytes of each kind of memory that are live at the peak of the step or, if
    `is_in_optimizer`, while the optimizer runs. Its own bytes are left out."""
    value_of = value_of_storage(trace, graph)
    gradients = {value_of.get(trace.storage_of[g.name]) for g in trace.gradients}
    live = graph.results if is_in_optimizer else timeline.live(timeline.peak_run)
    live_bytes = sum(graph.values[v].size_bytes for v in graph.results)
    if not is_in_optimizer:
        live_bytes = timeline.peak_bytes - graph.constant_bytes
    gradient_bytes = sum(graph.values[v].size_bytes for v in live if v in gradients)
    resident = trace.placeholder_bytes()
    parts = {
        "parameters": resident["parameter"],
        "buffers": resident["buffer"] + resident["constant"],
        "inputs": resident["input"],
        "libraries": trace.library_bytes,
        "gradients": gradient_bytes,
    }
    if trace.accumulates_gradients:
        parts["gradients"] += accumulated_gradient_bytes(trace)
    parts["outputs" if is_in_optimizer else "activations"] = live_bytes - gradient_bytes
    return parts
