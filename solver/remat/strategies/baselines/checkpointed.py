"""From "these values are kept" to a schedule: what the checkpointing baselines share.

A `Builder` writes the sequence and knows which values it holds. `segmented` is the executor of
segment checkpointing: within a segment nothing outlives the forward pass but what is kept; the
backward pass makes a segment's values again, all of them at once, right before it first reads one.
That is what torch.utils.checkpoint does (non-reentrant, with early stop).

A graph without a backward pass is checkpointed over its whole order: what a segment does not keep
is dropped at the end of the segment, and made again from what is held when it is next read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from remat.errors import RematError
from remat.graph import Graph
from remat.limits.budget import format_bytes
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.infeasible import infeasible

Segments = Sequence[Sequence[int]]
"""Operations of each segment, in order; disjoint, and not necessarily all operations."""


def forward_count(graph: Graph) -> int | None:
    """How many operations come before the backward pass; None if there is no such border."""
    if graph.boundary is not None:
        return graph.boundary or None
    flagged = (op for op, operation in enumerate(graph.operations) if operation.backward)
    return next(flagged, 0) or None


def saving_count(graph: Graph, name: str) -> int:
    """As `forward_count`, for a strategy that decides what is saved. Raises `RematError` where no
    backward pass is marked."""
    count = forward_count(graph)
    if count is None:
        raise RematError(
            f"{name} saves values for a backward pass, and no operation is marked `backward`: mark "
            "them, or use ChenSqrt"
        )
    return count


def checkpointed_count(graph: Graph) -> int:
    """How many operations segments are made of: the forward pass, or all where none is marked."""
    return forward_count(graph) or len(graph)


class Builder:
    """A sequence under construction, and the values that it holds.

    What cannot be made again (results, outputs of operations that run once) and what weighs
    nothing is never dropped; nor is what the backward pass makes.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs: list[int] = []
        count = checkpointed_count(graph)
        self.is_droppable = [
            graph.operations[op].recomputable
            and op < count
            and v not in graph.results
            and value.size_bytes > 0
            for v, (op, value) in enumerate(zip(graph.producer, graph.values, strict=True))
        ]
        self._is_held = [False] * len(graph.values)

    def run(self, op: int) -> None:
        """Run one operation whose inputs are held."""
        self.runs.append(op)
        for v in self.graph.operations[op].outputs:
            self._is_held[v] = True

    def drop(self, values: Iterable[int]) -> None:
        """Hold these values no longer, as far as they can be made again."""
        for v in values:
            if self.is_droppable[v]:
                self._is_held[v] = False

    def holds(self, value: int) -> bool:
        """Whether a reader of this value needs no recomputation."""
        return self._is_held[value]

    def missing(self, values: Iterable[int]) -> list[int]:
        """The operations that have to run again before all of `values` are held."""
        found: set[int] = set()
        stack = [v for v in values if not self._is_held[v]]
        while stack:
            op = self.graph.producer[stack.pop()]
            if op not in found:
                found.add(op)
                stack += [v for v in self.graph.operations[op].inputs if not self._is_held[v]]
        return sorted(found)

    def ensure(self, values: Collection[int], *, transient: bool = True) -> None:
        """Make again what is missing of `values`; `transient` drops what else that makes."""
        again = self.missing(values)
        for op in again:
            self.run(op)
        if transient:
            wanted = set(values)
            made = (v for op in again for v in self.graph.operations[op].outputs)
            self.drop(v for v in made if v not in wanted)

    def schedule(self) -> Schedule:
        """What was written."""
        return Schedule.of(self.runs)


def borders(graph: Graph, segments: Segments) -> set[int]:
    """What segments keep: every value that the forward pass reads in another segment.

    Over a whole order, where anything may be read later: the outputs of each segment's last
    operation.
    """
    count = forward_count(graph)
    if count is None:
        return {v for ops in segments if ops for v in graph.operations[ops[-1]].outputs}
    segment_of = {op: number for number, ops in enumerate(segments) for op in ops}
    return {
        v
        for op in range(count)
        for v in graph.operations[op].inputs
        if segment_of.get(graph.producer[v]) != segment_of.get(op)
    }


def segmented(graph: Graph, segments: Segments, kept: Collection[int] | None = None) -> Schedule:
    """The schedule that checkpoints `segments` and keeps `kept`, by default their `borders`."""
    kept = borders(graph, segments) if kept is None else kept
    builder = Builder(graph)
    count = forward_count(graph)
    dropped = [
        [v for op in ops for v in graph.operations[op].outputs if v not in kept] for ops in segments
    ]
    if count is None:
        _over_the_order(builder, segments, dropped)
    else:
        _before_the_backward(builder, count, segments, dropped)
    return builder.schedule()


def _before_the_backward(
    builder: Builder, count: int, segments: Segments, dropped: Sequence[Sequence[int]]
) -> None:
    graph = builder.graph
    segment_of = {op: number for number, ops in enumerate(segments) for op in ops}
    for op in range(count):
        builder.run(op)
    for values in dropped:
        builder.drop(values)
    for op in range(count, len(graph)):
        inputs = graph.operations[op].inputs
        touched = {segment_of[graph.producer[v]] for v in inputs if not builder.holds(v)}
        for number in sorted(touched):
            builder.ensure(
                [v for v in dropped[number] if graph.consumers[v] and graph.consumers[v][-1] >= op]
            )
        builder.run(op)


def _over_the_order(builder: Builder, segments: Segments, dropped: Sequence[Sequence[int]]) -> None:
    graph = builder.graph
    segment_of = {op: number for number, ops in enumerate(segments) for op in ops}
    last = {ops[-1]: number for number, ops in enumerate(segments) if ops}
    again: list[int] = []
    for op in range(len(graph)):
        for parent in builder.missing(graph.operations[op].inputs):
            builder.run(parent)
            again += [
                v for v in graph.operations[parent].outputs if v in dropped[segment_of[parent]]
            ]
        builder.run(op)
        if op in last:
            builder.drop(dropped[last[op]])
        if op in last or op not in segment_of:
            builder.drop(again)
            again = []


def cheapest(
    task: Task, candidates: Iterable[tuple[str, Schedule]], *, name: str, is_sorted: bool = False
) -> Solution:
    """Of a strategy's candidates, each with the choice that made it, the cheapest within the
    budget; without one, the smallest peak. `is_sorted` says that the cheapest come first, so that
    the first within a budget is the one.

    Raises `InfeasibleBudget` with the smallest peak of all, and `RematError` if cancelled before
    any was found.
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
        if cancel is not None and cancel.is_set():
            if best is None:
                raise RematError(f"{name} was cancelled before it found a schedule that fits")
            break
    if smallest_bytes is None:
        raise RematError(f"{name} found nothing to choose from in this graph")
    if best is None:
        assert budget_bytes is not None
        reason = f"{name} reaches {format_bytes(smallest_bytes)} with {len(tried)} choices tried"
        raise infeasible(graph, budget_bytes, smallest_bytes, reason, proved=False)
    return Solution(best[2], stats={"choice": best[1], "choices": len(tried)})
