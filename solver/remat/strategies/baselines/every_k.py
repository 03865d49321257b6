"""One checkpoint per k blocks, with the k that the budget requires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from remat.graph import Graph
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.chains.chain import cut_points
from remat.strategies.baselines.module_blocks import find_blocks, merge_consecutive
from remat.strategies.baselines.schedule_builder import (
    checkpoint_segments,
    segmented_count,
    select_cheapest,
)
from remat.strategies.option_types import Checked, between

_MAX_PIECES = 32
_MAX_K_TRIED = 64


@dataclass(frozen=True)
class EveryK(Checked):
    """torch.utils.checkpoint around each `k` consecutive blocks; the best `k` if that is None.

    If the graph has no repeated blocks, pieces between cut points of the forward pass are used
    instead, and if it has few of these, pieces of equal cost. Equivalent to
    torch.utils.checkpoint.checkpoint_sequential, except that the last segment is no exception.
    """

    k: Annotated[int, between(1, 1_000_000)] | None = None
    name = "every_k"

    def run(self, task: Task) -> Solution:
        """Return the cheapest `k` that fits. Raises `InfeasibleBudget` if no `k` fits."""
        pieces = _pieces_of(task.graph)
        # A larger k recomputes the same operations with fewer borders: try all k up to 64, and the
        # largest.
        all_k = [k for k in range(1, len(pieces) + 1) if k <= _MAX_K_TRIED or k == len(pieces)]
        k_values = all_k if self.k is None else [self.k]
        candidates = (
            (f"k={k}", checkpoint_segments(task.graph, merge_consecutive(pieces, k)))
            for k in k_values
        )
        return select_cheapest(task, candidates, strategy=self.name)


def _pieces_of(graph: Graph) -> list[tuple[int, ...]]:
    blocks = find_blocks(graph)
    if len(blocks) > 1:
        return blocks
    count = segmented_count(graph)
    ends = [*cut_points(graph), count - 1]
    if len(ends) >= 4:
        starts = [0, *(end + 1 for end in ends[:-1])]
        return [tuple(range(a, b + 1)) for a, b in zip(starts, ends, strict=True) if a <= b]
    return _equal_cost(graph, count)


def _equal_cost(graph: Graph, count: int) -> list[tuple[int, ...]]:
    total_s = sum(operation.cost_s for operation in graph.operations[:count])
    pieces: list[list[int]] = [[]]
    cost_s = 0.0
    for op in range(count):
        if pieces[-1] and cost_s >= total_s * len(pieces) / min(_MAX_PIECES, count):
            pieces.append([])
        pieces[-1].append(op)
        cost_s += graph.operations[op].cost_s
    return [tuple(ops) for ops in pieces if ops]
