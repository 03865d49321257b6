"""Segments of sqrt(n) operations.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost (2016), section 4.1: n
operations in segments of sqrt(n), of which only the borders are kept, take O(sqrt(n)) memory and
one more forward pass.
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
    select_cheapest,
    segmented_count,
    forward_count,
    checkpoint_segments,
)
from remat.strategies.options import Checked


@dataclass(frozen=True)
class ChenSqrt(Checked):
    """sqrt(n) segments of the forward pass in its linear order, one choice without a parameter.

    For graphs that are no chain, every value that crosses a border is kept. The last segment is
    not dropped, as its backward pass follows at once.
    """

    name = "chen_sqrt"

    def run(self, task: Task) -> Solution:
        """The one schedule there is; `InfeasibleBudget` if that does not fit."""
        ends = sqrt_ends(range(segmented_count(task.graph)))
        candidates = [(f"{len(ends)} checkpoints", cut_after(task.graph, ends))]
        return select_cheapest(task, candidates, strategy=self.name)


def sqrt_ends(candidates: Sequence[int]) -> list[int]:
    """Every sqrt(n)-th of n candidates for the end of a segment, the last one excepted."""
    step = max(1, round(math.sqrt(len(candidates))))
    return [op for op in candidates[step - 1 :: step] if op != candidates[-1]]


def cut_after(graph: Graph, ends: Sequence[int]) -> Schedule:
    """The schedule with a segment up to each of `ends`; what comes after the last of them is
    dropped only where there is no backward pass."""
    starts = [0, *(end + 1 for end in ends)]
    segments: Segments = [range(a, b + 1) for a, b in zip(starts, ends, strict=False)]
    if forward_count(graph) is None and starts[-1] < len(graph):
        segments = [*segments, range(starts[-1], len(graph))]
    return checkpoint_segments(graph, segments)
