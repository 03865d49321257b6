"""Segments of the forward pass, of which only the borders are retained.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost (2016). `ChenSqrt`, section
4.1: n operations in segments of sqrt(n) take O(sqrt(n)) memory and one more forward pass.
`ChenGreedy`, algorithm 3: walk the forward pass, and end a segment where its values exceed b bytes.
The paper searches b around sqrt(x y), where x is the size of the borders and y the largest segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import (
    Segments,
    checkpoint_segments,
    forward_count,
    segmented_count,
    select_cheapest,
)
from remat.strategies.option_types import Checked, between


@dataclass(frozen=True)
class ChenSqrt(Checked):
    """sqrt(n) segments of the forward pass in its linear order; a single choice without a
    parameter.

    In graphs that are no chain, every value that crosses a border is retained. The last segment is
    not dropped, as its backward pass follows at once.
    """

    name = "chen_sqrt"

    def run(self, task: Task) -> Solution:
        """Return the single schedule. Raises `InfeasibleBudget` if it does not fit."""
        ends = sqrt_ends(range(segmented_count(task.graph)))
        candidates = [(f"{len(ends)} checkpoints", checkpoint_after(task.graph, ends))]
        return select_cheapest(task, candidates, strategy=self.name)


def sqrt_ends(candidates: Sequence[int]) -> list[int]:
    """Return every sqrt(n)-th of n candidates for the end of a segment, except for the last one."""
    step = max(1, round(math.sqrt(len(candidates))))
    return [op for op in candidates[step - 1 :: step] if op != candidates[-1]]


def checkpoint_after(graph: Graph, ends: Sequence[int]) -> Schedule:
    """Return the schedule with a segment up to each of `ends`. What comes after the last of them is
    dropped only if there is no backward pass."""
    starts = [0, *(end + 1 for end in ends)]
    segments: Segments = [range(a, b + 1) for a, b in zip(starts, ends, strict=False)]
    if forward_count(graph) is None and starts[-1] < len(graph):
        segments = [*segments, range(starts[-1], len(graph))]
    return checkpoint_segments(graph, segments)


_GRID_STEPS = 48


@dataclass(frozen=True)
class ChenGreedy(Checked):
    """Algorithm 3 with `parameter_bytes` as b, or the best of a geometric grid if that is None.

    The grid ranges from the largest value to the entire forward pass, so it includes the paper's.
    """

    parameter_bytes: Annotated[int, between(0, 2**62)] | None = None
    name = "chen_greedy"

    def run(self, task: Task) -> Solution:
        """Return the cheapest b that fits. Raises `InfeasibleBudget` if no b fits."""
        all_operations = range(segmented_count(task.graph))
        candidates = greedy_candidates(task.graph, all_operations, self.parameter_bytes)
        return select_cheapest(task, candidates, strategy=self.name)


def greedy_candidates(
    graph: Graph, allowed: Sequence[int], parameter_bytes: int | None
) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules of algorithm 3 for each b, with segments that end in one of `allowed`."""
    tried: set[tuple[int, ...]] = set()
    for b in _grid(graph) if parameter_bytes is None else [parameter_bytes]:
        ends = _ends(graph, set(allowed), b)
        if ends not in tried:
            tried.add(ends)
            yield f"b={b} bytes, {len(ends)} checkpoints", checkpoint_after(graph, ends)


def _ends(graph: Graph, allowed: set[int], parameter_bytes: int) -> tuple[int, ...]:
    count = segmented_count(graph)
    ends: list[int] = []
    segment_bytes = 0
    for op in range(count - 1):
        segment_bytes += sum(graph.values[v].size_bytes for v in graph.operations[op].outputs)
        if op in allowed and segment_bytes > parameter_bytes:
            ends.append(op)
            segment_bytes = 0
    return tuple(ends)


def _grid(graph: Graph) -> list[int]:
    sizes = [
        sum(graph.values[v].size_bytes for v in operation.outputs)
        for operation in graph.operations[: segmented_count(graph)]
    ]
    low, high = max(1, max(sizes, default=1)), max(1, sum(sizes))
    ratio = (high / low) ** (1 / _GRID_STEPS)
    return [0, *sorted({math.floor(low * ratio**step) for step in range(_GRID_STEPS + 1)})]
