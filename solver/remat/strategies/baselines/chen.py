"""Segments of the forward pass, of which only the borders are retained, as published.

Chen, Xu, Zhang, Guestrin: Training deep nets with sublinear memory cost (2016). `ChenSqrt`, section
4.1: n operations in segments of sqrt(n) take O(sqrt(n)) memory and one more forward pass.
`ChenGreedy`, algorithm 3: walk the forward pass, and end a segment where its values exceed b bytes.
The paper searches b around sqrt(x y), where x is the size of the borders and y the largest segment.

`ArticulationPoints` is Checkmate's variant of both for graphs with branches (Jain et al., MLSys
2020, section 6.1, "AP sqrt(n)" and "AP greedy"): segments end at articulation points only. An
articulation point of the undirected forward graph is an operation whose removal disconnects it, so
everything after it can be recomputed from its output alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import (
    checkpoint_segments,
    forward_count,
    segmented_count,
    segments_ending_at,
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
        ends = sqrt_segment_ends(range(segmented_count(task.graph)))
        candidates = [(f"{len(ends)} checkpoints", checkpoint_after(task.graph, ends))]
        return select_cheapest(task, candidates, strategy=self.name)


def sqrt_segment_ends(candidates: Sequence[int]) -> list[int]:
    """Return every sqrt(n)-th of n candidates for the end of a segment, except for the last one."""
    step = max(1, round(math.sqrt(len(candidates))))
    return [op for op in candidates[step - 1 :: step] if op != candidates[-1]]


def checkpoint_after(graph: Graph, ends: Sequence[int]) -> Schedule:
    """Return the schedule with a segment up to each of `ends`. What comes after the last of them is
    dropped only if there is no backward pass."""
    if forward_count(graph) is None:
        ends = [*ends, len(graph) - 1]
    return checkpoint_segments(graph, segments_ending_at(ends))


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
    """Yield the schedules of algorithm 3, for `parameter_bytes` as b or for each b of a grid, with
    segments that end in one of `allowed`. Each comes with its choice as text."""
    tried: set[tuple[int, ...]] = set()
    for b in _parameter_grid_bytes(graph) if parameter_bytes is None else [parameter_bytes]:
        ends = _greedy_segment_ends(graph, set(allowed), b)
        if ends not in tried:
            tried.add(ends)
            yield f"b={b} bytes, {len(ends)} checkpoints", checkpoint_after(graph, ends)


def _greedy_segment_ends(graph: Graph, allowed: set[int], parameter_bytes: int) -> tuple[int, ...]:
    """Return the operations at which algorithm 3 ends segments, for `parameter_bytes` as b."""
    count = segmented_count(graph)
    ends: list[int] = []
    segment_bytes = 0
    for op in range(count - 1):
        segment_bytes += sum(graph.values[v].size_bytes for v in graph.operations[op].outputs)
        if op in allowed and segment_bytes > parameter_bytes:
            ends.append(op)
            segment_bytes = 0
    return tuple(ends)


def _parameter_grid_bytes(graph: Graph) -> list[int]:
    """Return the values of b that are tried: 0, and from the largest value to the whole forward."""
    sizes = [
        sum(graph.values[v].size_bytes for v in operation.outputs)
        for operation in graph.operations[: segmented_count(graph)]
    ]
    low, high = max(1, max(sizes, default=1)), max(1, sum(sizes))
    ratio = (high / low) ** (1 / _GRID_STEPS)
    return [0, *sorted({math.floor(low * ratio**step) for step in range(_GRID_STEPS + 1)})]


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
            ends = sqrt_segment_ends([*points, segmented_count(graph) - 1])
            candidates = iter([(f"{len(ends)} checkpoints", checkpoint_after(graph, ends))])
        return select_cheapest(task, candidates, strategy=self.name)


def articulation_points(graph: Graph) -> list[int]:
    """Return the operations that separate the forward graph into what comes after and most of what
    comes before, by time."""
    count = segmented_count(graph)
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for op in range(count):
        for v in graph.operations[op].inputs:
            neighbours[op].add(graph.producer[v])
            neighbours[graph.producer[v]].add(op)
    tree_of: dict[int, _SearchTree] = {}  # by operation: the tree of its component
    for root in reversed(range(count)):
        if root not in tree_of:
            tree = _SearchTree(neighbours, root)
            tree_of |= dict.fromkeys(tree.order, tree)
    costs_s = [operation.cost_s for operation in graph.operations[:count]]
    other_costs_s = [
        0.0 if tree_of[op] is tree_of[count - 1] else cost_s for op, cost_s in enumerate(costs_s)
    ]
    before_s = [0.0, *accumulate(costs_s)]
    others_before_s = [0.0, *accumulate(other_costs_s)]

    def separates(point: int) -> bool:
        """True if removing `point` disconnects most of what comes before it from the last
        operation. What is not connected with that anyway counts as disconnected."""
        tree = tree_of[point]
        parts = tree.separated(point)
        separated_s = others_before_s[point]
        if tree is tree_of[count - 1]:
            ops = (op for start, end in parts for op in tree.order[start:end])
            separated_s += sum(costs_s[op] for op in ops if op < point)
        return bool(parts) and separated_s >= _MIN_SEPARATED_SHARE * before_s[point]

    return [op for op in range(1, count - 1) if separates(op)]


class _SearchTree:
    """The tree of a depth-first search from an operation (Tarjan, 1972). The search visits the
    operations in `order`, all of a subtree in one stretch."""

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
        """Return the stretches of the order that removing `point` disconnects from the root. If it
        is the root, return all subtrees, or none if there is only one."""
        children = self._children[point]
        if point == self.order[0] and len(children) < 2:
            return []
        return [
            (self._start[child], self._end[child])
            for child in children
            if self._lowest[child] >= self._start[point]
        ]
