"""One checkpoint per k blocks, for the k that the budget asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from remat.graph import Graph
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.chains.chain import cut_points
from remat.strategies.baselines.schedule_builder import select_cheapest, segmented_count, checkpoint_segments
from remat.strategies.baselines.module_blocks import find_blocks, merge_consecutive
from remat.strategies.options import Checked, between

_PIECES = 32
_CHOICES = 64


@dataclass(frozen=True)
class EveryK(Checked):
    """torch.utils.checkpoint around each `k` consecutive blocks; the best `k` if that is None.

    Where the graph has no repeated blocks, pieces between cut points of the forward pass take
    their place, and where it has few of these, pieces of equal cost. Equivalent to
    torch.utils.checkpoint.checkpoint_sequential, except that the last segment is no exception.
    """

    k: Annotated[int, between(1, 1_000_000)] | None = None
    name = "every_k"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting `k`. Raises `InfeasibleBudget` where no `k` fits."""
        found = _pieces(task.graph)
        # A larger k recomputes the same operations with fewer borders: all k up to 64, then few.
        every = [k for k in range(1, len(found) + 1) if k <= _CHOICES or k == len(found)]
        wanted = every if self.k is None else [self.k]
        candidates = ((f"k={k}", checkpoint_segments(task.graph, merge_consecutive(found, k))) for k in wanted)
        return select_cheapest(task, candidates, strategy=self.name)


def _pieces(graph: Graph) -> list[tuple[int, ...]]:
    found = find_blocks(graph)
    if len(found) > 1:
        return found
    count = segmented_count(graph)
    ends = [*cut_points(graph), count - 1]
    if len(ends) >= 4:
        starts = [0, *(end + 1 for end in ends[:-1])]
        return [tuple(range(a, b + 1)) for a, b in zip(starts, ends, strict=True) if a <= b]
    return _equal_cost(graph, count)


def _equal_cost(graph: Graph, count: int) -> list[tuple[int, ...]]:
    total_s = sum(operation.cost_s for operation in graph.operations[:count])
    found: list[list[int]] = [[]]
    spent_s = 0.0
    for op in range(count):
        if found[-1] and spent_s >= total_s * len(found) / min(_PIECES, count):
            found.append([])
        found[-1].append(op)
        spent_s += graph.operations[op].cost_s
    return [tuple(ops) for ops in found if ops]
