"""Segments of sqrt(n) operations.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost (2016), section 4.1: n
operations in segments of sqrt(n), of which only the borders are retained, take O(sqrt(n)) memory
and one more forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
from remat.strategies.option_types import Checked


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
