"""Schedules by one rule for all operations or blocks, as training scripts have them.

Retain everything, which PyTorch does without checkpointing, or nothing; one checkpoint per block,
by torch.utils.checkpoint, or per k blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.strategies.base import Task, infeasible
from remat.strategies.baselines.module_blocks import cut_points, find_blocks, merge_segments
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    checkpoint_segments,
    forward_count,
    segmented_count,
    segments_ending_at,
    select_cheapest,
)
from remat.strategies.option_types import Checked, between


@dataclass(frozen=True)
class KeepAll(Checked):
    """Every operation once: the fastest schedule, and the one with the largest peak."""

    name = "keep_all"

    def run(self, task: Task) -> Solution:
        """Return the graph's own order. Raises `InfeasibleBudget` if it does not fit."""
        graph, budget_bytes = task.graph, task.budget_bytes
        schedule = Schedule.keep_all(graph)
        peak_bytes = simulate(graph, schedule).peak_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            raise infeasible(
                graph, budget_bytes, peak_bytes, "keep_all recomputes nothing", proved=False
            )
        bound = graph.total_cost_s if budget_bytes is not None else None
        return Solution(schedule, bound, "order", proved=budget_bytes is not None)


@dataclass(frozen=True)
class RecomputeAll(Checked):
    """Before each operation of the backward pass, recompute everything that it reads from the
    inputs, and drop it afterwards: quadratic time.

    This is not the smallest peak, as a recomputation needs as much memory as the forward pass
    between two reads. Without a backward pass, each operation starts from the inputs.
    """

    name = "recompute_all"

    def run(self, task: Task) -> Solution:
        """Return the single schedule. Raises `InfeasibleBudget` if it does not fit."""
        return select_cheapest(
            task, [("all", _recompute_all_schedule(task.graph))], strategy=self.name
        )


def _recompute_all_schedule(graph: Graph) -> Schedule:
    builder = ScheduleBuilder(graph)
    count = forward_count(graph) or 0
    for op in range(count):
        builder.run(op)
    builder.drop(v for op in range(count) for v in graph.operations[op].outputs)
    for op in range(count, len(graph)):
        operation = graph.operations[op]
        recomputed = builder.missing_operations(operation.inputs)
        for parent in recomputed:
            builder.run(parent)
        builder.run(op)
        builder.drop(v for o in (*recomputed, op) for v in graph.operations[o].outputs)
    return builder.schedule()


_MAX_SEGMENTS = 32
_MAX_K_TRIED = 64


@dataclass(frozen=True)
class EveryK(Checked):
    """torch.utils.checkpoint around each `k` consecutive blocks; the best `k` if that is None.

    If the graph has no repeated blocks, segments between cut points of the forward pass are used
    instead, and if it has few of these, segments of equal cost. Equivalent to
    torch.utils.checkpoint.checkpoint_sequential, except that the last segment is no exception.
    """

    k: Annotated[int, between(1, 1_000_000)] | None = None
    name = "every_k"

    def run(self, task: Task) -> Solution:
        """Return the cheapest `k` that fits. Raises `InfeasibleBudget` if no `k` fits."""
        segments = _smallest_segments(task.graph)
        # A larger k recomputes the same operations with fewer borders: try all k up to 64, and the
        # largest.
        all_k = [k for k in range(1, len(segments) + 1) if k <= _MAX_K_TRIED or k == len(segments)]
        k_values = all_k if self.k is None else [self.k]
        candidates = (
            (f"k={k}", checkpoint_segments(task.graph, merge_segments(segments, k)))
            for k in k_values
        )
        return select_cheapest(task, candidates, strategy=self.name)


def _smallest_segments(graph: Graph) -> list[tuple[int, ...]]:
    """Return the segments that checkpoints are put around: repeated blocks, or the operations
    between cut points, or segments of equal cost."""
    blocks = find_blocks(graph)
    if len(blocks) > 1:
        return blocks
    count = segmented_count(graph)
    ends = [*cut_points(graph), count - 1]
    if len(ends) >= 4:
        return segments_ending_at(ends)
    return _segments_of_equal_cost(graph, count)


def _segments_of_equal_cost(graph: Graph, count: int) -> list[tuple[int, ...]]:
    """Return up to `_MAX_SEGMENTS` segments of the first `count` operations, of about equal
    time."""
    total_s = sum(operation.cost_s for operation in graph.operations[:count])
    segments: list[list[int]] = [[]]
    cost_s = 0.0
    for op in range(count):
        if segments[-1] and cost_s >= total_s * len(segments) / min(_MAX_SEGMENTS, count):
            segments.append([])
        segments[-1].append(op)
        cost_s += graph.operations[op].cost_s
    return [tuple(ops) for ops in segments if ops]


@dataclass(frozen=True)
class PerBlock(Checked):
    """torch.utils.checkpoint (non-reentrant, with early stop) around each repeated block.

    Blocks come from the operations' module paths (see `module_blocks`). Values that cross a block's
    border are retained, and so is everything outside blocks. Equivalent to
    `model.activation_checkpointing_enable()` of transformers.
    """

    name = "per_block"

    def run(self, task: Task) -> Solution:
        """Return the single schedule. Raises `RematError` for a graph without numbered modules."""
        blocks = find_blocks(task.graph)
        if not blocks:
            raise RematError(
                "per_block needs repeated blocks, but no operation has a module path with a "
                'number, such as "layers.0": use EveryK, or ChenSqrt'
            )
        candidates = [(f"{len(blocks)} blocks", checkpoint_segments(task.graph, blocks))]
        return select_cheapest(task, candidates, strategy=self.name)
