"""Chen's checkpoints at articulation points only: Checkmate's variants for graphs with branches.

Jain et al.: Checkmate (MLSys 2020), section 6.1, "AP sqrt(n)" and "AP greedy": an articulation
point of the undirected forward graph is an operation whose removal disconnects it, so everything
after it can be recomputed from its output alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from remat.errors import RematError
from remat.graph import Graph
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.chen_greedy import greedy_candidates
from remat.strategies.baselines.chen_sqrt import checkpoint_after, sqrt_ends
from remat.strategies.baselines.schedule_builder import segmented_count, select_cheapest
from remat.strategies.option_types import Checked

_MIN_SEPARATED_SHARE = 0.5
"""Share of the forward time before an articulation point that removing it must disconnect."""


@dataclass(frozen=True)
class ArticulationPoints(Checked):
    """`ChenSqrt` or `ChenGreedy` with segments that end at articulation points.

    Points that only separate a side branch, such as the computation of a mask, do not count.
    """

    variant: Literal["sqrt", "greedy"] = "greedy"

    @property
    def name(self) -> str:
        """The strategy's name in `Plan.stats`."""
        return f"ap_{self.variant}"

    def run(self, task: Task) -> Solution:
        """Return the cheapest choice that fits. Raises `RematError` without articulation points,
        and `InfeasibleBudget` if no choice fits."""
        graph = task.graph
        points = articulation_points(graph)
        if not points:
            raise RematError(
                f"{self.name} needs articulation points, and the forward pass has none (its "
                "branches span all of it, as skip connections do): use ChenSqrt or ChenGreedy"
            )
        if self.variant == "greedy":
            candidates = greedy_candidates(graph, points, None)
        else:
            ends = sqrt_ends([*points, segmented_count(graph) - 1])
            candidates = iter([(f"{len(ends)} checkpoints", checkpoint_after(graph, ends))])
        return select_cheapest(task, candidates, strategy=self.name)


def articulation_points(graph: Graph) -> list[int]:
    """Return the operations that separate the forward graph into what comes before and after."""
    count = segmented_count(graph)
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for op in range(count):
        for v in graph.operations[op].inputs:
            neighbours[op].add(graph.producer[v])
            neighbours[graph.producer[v]].add(op)
    tree = _SearchTree(neighbours, count - 1)
    costs_s = np.array([graph.operations[op].cost_s for op in tree.order])
    order = np.array(tree.order, dtype=np.int64)
    before_s = [0.0, *accumulate(operation.cost_s for operation in graph.operations[:count])]

    def separates(point: int) -> bool:
        """True if removing `point` disconnects most of what comes before it from the last
        operation."""
        parts = [slice(a, b) for a, b in tree.separated(point)]
        separated_s = sum(float(costs_s[part][order[part] < point].sum()) for part in parts)
        return bool(parts) and separated_s >= _MIN_SEPARATED_SHARE * before_s[point]

    return [op for op in range(1, count - 1) if separates(op)]


class _SearchTree:
    """The tree of a depth-first search from an operation (Tarjan, 1972). The search visits the
    operations in `order`, those of a subtree in one stretch."""

    def __init__(self, neighbours: list[set[int]], root: int) -> None:
        self.order: list[int] = []
        self._children: dict[int, list[int]] = {}
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._lowest: dict[int, int] = {}
        """The first visited operation that a subtree has an edge to, by its place in the order."""
        self._visit(root)
        stack = [(root, iter(sorted(neighbours[root])))]
        while stack:
            op, remaining = stack[-1]
            for other in remaining:
                if other not in self._start:
                    self._children[op].append(other)
                    self._visit(other)
                    stack.append((other, iter(sorted(neighbours[other]))))
                    break
                if len(stack) < 2 or other != stack[-2][0]:
                    self._lowest[op] = min(self._lowest[op], self._start[other])
            else:
                self._end[op] = len(self.order)
                stack.pop()
                if stack:
                    parent = stack[-1][0]
                    self._lowest[parent] = min(self._lowest[parent], self._lowest[op])

    def _visit(self, op: int) -> None:
        self._start[op] = self._lowest[op] = len(self.order)
        self._children[op] = []
        self.order.append(op)

    def separated(self, point: int) -> list[tuple[int, int]]:
        """Return the stretches of the order that are connected with the root by `point` only."""
        if point not in self._start:
            return []
        return [
            (self._start[child], self._end[child])
            for child in self._children[point]
            if self._lowest[child] >= self._start[point]
        ]
