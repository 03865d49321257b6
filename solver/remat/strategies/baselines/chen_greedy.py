"""Segments of about b bytes each.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost (2016), algorithm 3: walk
the forward pass, and end a segment where its values exceed b bytes. The paper searches b around
sqrt(x y), where x is the size of the borders and y the largest segment.
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
from remat.strategies.baselines.chen_sqrt import checkpoint_after
from remat.strategies.baselines.schedule_builder import segmented_count, select_cheapest
from remat.strategies.option_types import Checked, between

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
