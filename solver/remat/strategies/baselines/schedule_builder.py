"""From "these values are retained" to a schedule: what the checkpointing baselines share.

A `ScheduleBuilder` writes the sequence and tracks which values are retained. `checkpoint_segments`
is segment checkpointing: within a segment only the retained values outlive the forward pass; the
backward pass recomputes a segment's values, all of them at once, right before it first reads one.
That is what torch.utils.checkpoint does (non-reentrant, with early stop).

A graph without a backward pass is checkpointed over its whole order: what a segment does not retain
is dropped at the end of the segment, and recomputed from what is retained when it is next read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from remat.errors import RematError
from remat.graph import Graph
from remat.limits.units import format_bytes
from remat.progress import is_cancelled
from remat.schedule import Schedule, missing_operations
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import Task, infeasible

Segments = Sequence[Sequence[int]]
"""Operations of each segment, in order; disjoint, and not necessarily all operations."""


def forward_count(graph: Graph) -> int | None:
    """Return the number of operations before the backward pass; None if there are none, or if no
    backward pass is marked."""
    if graph.boundary is not None:
        return graph.boundary or None
    backward = (op for op, operation in enumerate(graph.operations) if operation.backward)
    return next(backward, 0) or None


def required_forward_count(graph: Graph, strategy: str) -> int:
    """Return `forward_count` for a strategy that needs a backward pass. Raises `RematError` if none
    is marked."""
    count = forward_count(graph)
    if count is None:
        raise RematError(
            f"{strategy} saves values for a backward pass, and no operation is marked `backward`: "
            "mark them, or use ChenSqrt"
        )
    return count


def segmented_count(graph: Graph) -> int:
    """Return the number of operations that segments consist of: the forward pass, or all operations
    if no backward pass is marked."""
    return forward_count(graph) or len(graph)


class ScheduleBuilder:
    """A sequence under construction, with the values that are retained at its end.

    Values that cannot be recomputed (results, outputs of operations that run once or, for a part of
    the step, are not recomputed), values without bytes and values of the backward pass are never
    dropped.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs: list[int] = []
        count = segmented_count(graph)
        spans = graph.no_recompute_spans
        may_drop_outputs = [
            operation.recomputable and op < count and op not in spans
            for op, operation in enumerate(graph.operations)
        ]
        self.is_droppable: list[bool] = (
            np.array(may_drop_outputs, dtype=np.bool_)[list(graph.producer)]
            & ~graph.is_result
            & (graph.size_array_bytes > 0)
        ).tolist()
        self._retained: set[int] = set()

    def run(self, op: int) -> None:
        """Run one operation, whose inputs must be retained, and retain its outputs."""
        self.runs.append(op)
        self._retained.update(self.graph.operations[op].outputs)

    def drop(self, values: Iterable[int]) -> None:
        """Stop retaining these values, as far as they can be recomputed."""
        self._retained.difference_update(v for v in values if self.is_droppable[v])

    def missing_values(self, values: Iterable[int]) -> list[int]:
        """Return the `values` that are not retained: to read them takes a recomputation."""
        return [v for v in values if v not in self._retained]

    def missing_operations(self, values: Iterable[int]) -> list[int]:
        """Return the operations that have to be recomputed before all of `values` are retained."""
        return missing_operations(self.graph, values, self._retained)

    def recompute(self, values: Collection[int], *, drops_others: bool = True) -> None:
        """Recompute the `values` that are not retained; with `drops_others`, drop the other values
        that this recomputes."""
        recomputed = self.missing_operations(values)
        for op in recomputed:
            self.run(op)
        if drops_others:
            wanted = set(values)
            outputs = (v for op in recomputed for v in self.graph.operations[op].outputs)
            self.drop(v for v in outputs if v not in wanted)

    def schedule(self) -> Schedule:
        """Return the sequence as a schedule."""
        return Schedule.of(self.runs)


def segments_ending_at(ends: Sequence[int]) -> list[tuple[int, ...]]:
    """Return segments of operations: up to each of these ends, from after the end before it."""
    starts = [0, *(end + 1 for end in ends)]
    return [tuple(range(a, b + 1)) for a, b in zip(starts, ends, strict=False) if a <= b]


def segment_borders(graph: Graph, segments: Segments) -> set[int]:
    """Return the values that segments retain: of the forward pass, the values that it reads in
    another segment than it produces them.

    Without a backward pass, where anything may be read later: the outputs of each segment's last
    operation.
    """
    count = forward_count(graph)
    if count is None:
        return {v for ops in segments if ops for v in graph.operations[ops[-1]].outputs}
    segment_of = {op: segment for segment, ops in enumerate(segments) for op in ops}
    return {
        v
        for op in range(count)
        for v in graph.operations[op].inputs
        if segment_of.get(graph.producer[v]) != segment_of.get(op)
    }


def checkpoint_segments(
    graph: Graph,
    segments: Segments,
    retained: Collection[int] | None = None,
    backward: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule that checkpoints `segments` and retains `retained`, by default their
    `segment_borders`. `backward` are the operations of the backward pass in another order than the
    graph's."""
    retained = segment_borders(graph, segments) if retained is None else retained
    builder = ScheduleBuilder(graph)
    count = forward_count(graph)
    dropped = [
        [v for op in ops for v in graph.operations[op].outputs if v not in retained]
        for ops in segments
    ]
    if count is None:
        _checkpoint_whole_order(builder, segments, dropped)
    else:
        order = range(count, len(graph)) if backward is None else backward
        _checkpoint_forward_pass(builder, count, order, segments, dropped)
    return builder.schedule()


def _checkpoint_forward_pass(
    builder: ScheduleBuilder,
    count: int,
    backward: Sequence[int],
    segments: Segments,
    dropped: Sequence[Sequence[int]],
) -> None:
    """Run the forward pass, drop the segments' values, and recompute each segment in the backward
    pass."""
    graph = builder.graph
    producer = graph.producer
    segment_of = {op: segment for segment, ops in enumerate(segments) for op in ops}
    for op in range(count):
        builder.run(op)
    for values in dropped:
        builder.drop(values)
    position_of = {op: position for position, op in enumerate(backward)}
    last_read = [
        max((position_of.get(op, -1) for op in ops), default=-1) for ops in graph.consumers
    ]
    for position, op in enumerate(backward):
        if missing := builder.missing_values(graph.operations[op].inputs):
            for segment in sorted({segment_of[producer[v]] for v in missing}):
                builder.recompute([v for v in dropped[segment] if last_read[v] >= position])
        builder.run(op)


def eager_backward_order(graph: Graph) -> list[int]:
    """Return the operations of the backward pass in the order of eager mode with checkpoints.

    Those that read no gradient, such as the copy that autograd saves before it writes over a
    tensor, come right before their first reader: where they are, at the start of the backward, they
    would recompute their segment too early. Random operations stay where they are.
    """
    count = forward_count(graph) or 0
    backward = range(count, len(graph))
    if graph.boundary != count:
        return list(backward)  # it is unknown which operation has the first gradients
    reads_gradients = {count}
    for op in backward:
        if any(graph.producer[v] in reads_gradients for v in graph.operations[op].inputs):
            reads_gradients.add(op)
    results = {graph.producer[v] for v in graph.results}
    delayed = {
        op
        for op in backward
        if op not in reads_gradients | results and not graph.operations[op].order_sensitive
    }
    order: list[int] = []
    for op in backward:
        if op in delayed:
            continue
        needed: set[int] = set()
        stack = [op]
        while stack:
            producers = {graph.producer[v] for v in graph.operations[stack.pop()].inputs}
            stack += (producers & delayed) - needed
            needed |= producers & delayed
        order += [*sorted(needed), op]
        delayed -= needed
    return [*order, *sorted(delayed)]


def _checkpoint_whole_order(
    builder: ScheduleBuilder, segments: Segments, dropped: Sequence[Sequence[int]]
) -> None:
    """Run the whole order; drop each segment's values at its end, and recompute them when read."""
    graph = builder.graph
    segment_of = {op: segment for segment, ops in enumerate(segments) for op in ops}
    segment_ending_at = {ops[-1]: segment for segment, ops in enumerate(segments) if ops}
    recomputed_values: list[int] = []
    for op in range(len(graph)):
        for parent in builder.missing_operations(graph.operations[op].inputs):
            builder.run(parent)
            recomputed_values += [
                v for v in graph.operations[parent].outputs if v in dropped[segment_of[parent]]
            ]
        builder.run(op)
        if op in segment_ending_at:
            builder.drop(dropped[segment_ending_at[op]])
        if op in segment_ending_at or op not in segment_of:
            builder.drop(recomputed_values)
            recomputed_values = []


def save_values(graph: Graph, saved: Collection[int]) -> Schedule:
    """Return the schedule that saves these forward values for the backward pass, and recomputes
    each other one where the backward first reads it; it then stays until its last reader."""
    builder = ScheduleBuilder(graph)
    count = forward_count(graph) or 0
    for op in range(count):
        builder.run(op)
    outputs = (v for op in range(count) for v in graph.operations[op].outputs)
    builder.drop(v for v in outputs if v not in saved)
    for op in range(count, len(graph)):
        builder.recompute(graph.operations[op].inputs, drops_others=False)
        builder.run(op)
    return builder.schedule()


def select_cheapest(
    task: Task,
    candidates: Iterable[tuple[str, Schedule]],
    *,
    strategy: str,
    is_sorted: bool = False,
) -> Solution:
    """Return the cheapest candidate within the budget or, without a budget, the one with the
    smallest peak.

    A candidate is a schedule with the choice that led to it, in words. `is_sorted` means that the
    cheapest come first, so that the first within a budget is taken. Raises `InfeasibleBudget` with
    the smallest peak of all, and `RematError` if cancelled before any fits.
    """
    graph, budget_bytes, cancel = task.graph, task.budget_bytes, task.cancel
    best: tuple[tuple[float, float], str, Schedule] | None = None
    smallest_bytes: int | None = None
    tried: set[Schedule] = set()
    for choice, schedule in candidates:
        if schedule in tried:
            continue
        tried.add(schedule)
        peak_bytes, time_s = peak_and_time(graph, schedule)
        smallest_bytes = min(peak_bytes, peak_bytes if smallest_bytes is None else smallest_bytes)
        if budget_bytes is None or peak_bytes <= budget_bytes:
            key = (time_s, peak_bytes) if budget_bytes is not None else (peak_bytes, time_s)
            if best is None or key < best[0]:
                best = (key, choice, schedule)
        if best is not None and is_sorted and budget_bytes is not None:
            break
        if is_cancelled(cancel):
            if best is None:
                raise RematError(f"{strategy} was cancelled before it found a schedule that fits")
            break
    if smallest_bytes is None:
        raise RematError(f"{strategy} found nothing to choose from in this graph")
    if best is None:
        assert budget_bytes is not None
        reason = (
            f"{strategy} reaches {format_bytes(smallest_bytes)} with {len(tried)} choices tried"
        )
        raise infeasible(graph, budget_bytes, smallest_bytes, reason, proved=False)
    return Solution(best[2], stats={"choice": best[1], "choices": len(tried)})
