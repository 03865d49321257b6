"""Identical blocks: a run of equal stretches of the forward pass, and their backward passes.

Operations are compared by what the solver sees of them (cost, sizes, workspace, flags) and by where
their inputs come from: a number of operations before, or an operation of the block that the
backward is at, or the same operation for all blocks. The period is guessed from the distances
between equal operations, and checked by comparing the sequence with itself, shifted. Linear in the
graph's size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from remat.graph import Graph
from remat.milp.slots import Slots

_MAX_PERIODS = 12
"""Number of candidate periods that are tried."""

_COVERAGE_SHARE = 0.98
"""Share of the longest run's operations: a shorter period that covers as many is preferred."""

_MAX_PERIODS_BACK = 2
"""Inputs up to this many periods back are compared by their distance."""


@dataclass(frozen=True, slots=True)
class IdenticalBlocks:
    """The block of each operation (from 0, in the order of the forward pass) and its position in
    the block.

    Both are -1 for operations outside blocks. Positions of the backward come after the forward's.
    `forward_length` counts the operations of a block's forward pass.
    """

    count: int
    forward_length: int
    block_of: tuple[int, ...]
    position_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _BlockRun:
    """A run of `count` blocks of `period` operations each, from the operation `first` on."""

    first: int
    period: int
    count: int

    def locate(self, op: int) -> tuple[int, int] | None:
        """Return (block, offset) of an operation; None outside the run."""
        block, offset = divmod(op - self.first, self.period)
        return (block, offset) if 0 <= block < self.count else None


def find_identical_blocks(graph: Graph, min_blocks: int) -> IdenticalBlocks | None:
    """Return the longest sequence of identical blocks with their backward; None if there are fewer
    than `min_blocks`, or if the graph has no boundary."""
    boundary = graph.boundary
    if boundary is None:
        return None
    keys = [_operation_key(graph, op) for op in range(len(graph))]
    period = _find_block_period(keys[:boundary], min_blocks)
    backward_period = _find_block_period(keys[boundary:], min_blocks)
    if period is None or backward_period is None:
        return None

    def forward_sources(op: int, max_distance: int) -> list[Hashable]:
        producers = [(v, graph.producer[v]) for v in graph.operations[op].inputs]
        return [
            ("before", op - p, _output_index(graph, v)) if op - p <= max_distance else v
            for v, p in producers
        ]

    forward = _longest_block_run(
        [
            (keys[op], tuple(forward_sources(op, _MAX_PERIODS_BACK * period)))
            for op in range(boundary)
        ],
        period,
        0,
    )

    def backward_key(op: int) -> Hashable:
        sources: list[Hashable] = []
        for v in graph.operations[op].inputs:
            location = forward.locate(graph.producer[v])
            if location is None:
                distance = op - graph.producer[v]
                sources.append(
                    (distance, _output_index(graph, v))
                    if distance <= _MAX_PERIODS_BACK * backward_period
                    else v
                )
            else:
                sources.append(
                    (
                        location[0] + (op - boundary) // backward_period,
                        location[1],
                        _output_index(graph, v),
                    )
                )
        return (keys[op], tuple(sources))

    backward = _longest_block_run(
        [backward_key(op) for op in range(boundary, len(graph))], backward_period, boundary
    )
    return _pair_block_runs(graph, forward, backward, min_blocks)


def _pair_block_runs(
    graph: Graph, forward: _BlockRun, backward: _BlockRun, min_blocks: int
) -> IdenticalBlocks | None:
    """Return the blocks that have a forward and a backward: a backward block belongs to the forward
    block that it mostly reads. None if there are fewer than `min_blocks`."""
    block_sums: Counter[int] = Counter()
    for op in range(backward.first, backward.first + backward.period * backward.count):
        for v in graph.operations[op].inputs:
            location = forward.locate(graph.producer[v])
            if location is not None:
                block_sums[location[0] + (op - backward.first) // backward.period] += 1
    if not block_sums:
        return None
    total = block_sums.most_common(1)[0][0]
    low = max(0, total - backward.count + 1)
    high = min(forward.count - 1, total)
    if high - low + 1 < min_blocks:
        return None
    block_of, position_of = [-1] * len(graph), [-1] * len(graph)
    for op in range(len(graph)):
        if (location := forward.locate(op)) is not None:
            b, o = location
        elif (location := backward.locate(op)) is not None:
            b, o = total - location[0], location[1] + forward.period
        else:
            continue
        if low <= b <= high:
            block_of[op], position_of[op] = b - low, o
    return IdenticalBlocks(high - low + 1, forward.period, tuple(block_of), tuple(position_of))


def _operation_key(graph: Graph, op: int) -> Hashable:
    """Return what the solver sees of an operation: equal for identical operations."""
    o = graph.operations[op]
    outputs = tuple((graph.values[v].size_bytes, v in graph.results) for v in o.outputs)
    overwritten = tuple(o.inputs.index(v) for v in o.overwrites)
    memory_key = (o.workspace_bytes, outputs, len(o.inputs), overwritten)
    return (o.cost_s, memory_key, o.recomputable, o.order_sensitive)


def _output_index(graph: Graph, value: int) -> int:
    """Return the position of a value among its producer's outputs."""
    return graph.operations[graph.producer[value]].outputs.index(value)


def _find_block_period(keys: Sequence[Hashable], min_blocks: int) -> int | None:
    """Return the number of operations of a block: the smallest period whose repetitions cover
    (almost) the most keys. None if no period repeats `min_blocks` times."""
    last: dict[Hashable, int] = {}
    gaps: Counter[int] = Counter()
    for position, key in enumerate(keys):
        if key in last:
            gaps[position - last[key]] += 1
        last[key] = position
    candidates = sorted(gaps, key=lambda gap: -gaps[gap] * gap)[:_MAX_PERIODS]
    numbers = _numbered_keys(keys)
    covered = {
        gap: _longest_repetition(numbers, gap)[1] + gap
        for gap in candidates
        if gap * min_blocks <= len(keys)
    }
    covered = {gap: length for gap, length in covered.items() if length >= min_blocks * gap}
    longest = max(covered.values(), default=0)
    return min(
        (gap for gap, length in covered.items() if length >= _COVERAGE_SHARE * longest),
        default=None,
    )


def _longest_block_run(keys: Sequence[Hashable], period: int, offset: int) -> _BlockRun:
    """Return the longest sequence of blocks of `period` keys; the first key is operation
    `offset`."""
    start, length = _longest_repetition(_numbered_keys(keys), period)
    return _BlockRun(offset + start, period, length // period + 1 if length else 0)


def _numbered_keys(items: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return a number for each item, the same for equal ones."""
    number_of: dict[Hashable, int] = {}
    return np.array([number_of.setdefault(item, len(number_of)) for item in items], dtype=np.int64)


def _longest_repetition(numbers: NDArray[np.int64], lag: int) -> tuple[int, int]:
    """Return the start and the length of the longest stretch that equals the one `lag` later; (0,
    0) without any."""
    is_equal = np.concatenate(([False], numbers[:-lag] == numbers[lag:], [False]))
    edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def merge_neighbouring_blocks(blocks: IdenticalBlocks, width: int) -> IdenticalBlocks:
    """Return blocks that consist of `width` neighbouring blocks each. Blocks that are left over at
    the start are in none."""
    skipped = blocks.count % width
    positions = max(blocks.position_of) + 1
    pairs = [
        ((b - skipped) // width, ((b - skipped) % width) * positions + o)
        if b >= skipped
        else (-1, -1)
        for b, o in zip(blocks.block_of, blocks.position_of, strict=True)
    ]
    return IdenticalBlocks(
        blocks.count // width,
        blocks.forward_length * width,
        tuple(b for b, _ in pairs),
        tuple(o for _, o in pairs),
    )


@dataclass(frozen=True)
class SharedDecisions:
    """Which slots run together, and which values are retained together after them.

    `block_group` has the group of each block. `stages` has, for each slot, the first run that it
    comes before, or is. `has_rows` is true for the slots whose rows are written.
    """

    graph: Graph
    blocks: IdenticalBlocks
    block_group: tuple[int, ...]
    slots: Slots
    stages: tuple[int, ...]
    has_rows: tuple[bool, ...]

    @classmethod
    def of(
        cls, graph: Graph, blocks: IdenticalBlocks, slots: Slots, block_group: tuple[int, ...]
    ) -> SharedDecisions:
        """Return the shared decisions of these groups of blocks."""
        stages = [0] * len(slots)
        stage = 0
        for slot in range(len(slots) - 1, -1, -1):
            if not slots.is_optional[slot]:
                stage = slots.operations[slot]
            stages[slot] = stage
        shared = cls(graph, blocks, block_group, slots, tuple(stages), ())
        written = shared._blocks_with_rows()
        has_rows = tuple(blocks.block_of[stage] in written for stage in stages)
        return replace(shared, has_rows=has_rows)

    def _blocks_with_rows(self) -> set[int]:
        """Return the blocks for which rows are written: those at the ends of a group, the second
        block, as the first may read from another group, and any whose slots differ from a
        neighbour's. -1 stands for operations outside blocks."""
        keys: list[list[Hashable]] = [[] for _ in self.block_group]
        for slot, stage in enumerate(self.stages):
            if self.blocks.block_of[stage] >= 0:
                keys[self.blocks.block_of[stage]].append(self._slot_key(slot))
        written = {-1, 0, len(self.block_group) - 1}
        for block, (before, after) in enumerate(pairwise(self.block_group)):
            if before != after:
                written |= {block, block + 1, block + 2}
            elif keys[block] != keys[block + 1]:
                written |= {block, block + 1}
        return written

    def with_slots(self, slots: Slots) -> SharedDecisions:
        """Return the same groups of blocks over other slots."""
        return SharedDecisions.of(self.graph, self.blocks, slots, self.block_group)

    def group_of_slot(self, slot: int) -> int | None:
        """Return the group of the block that a slot is in; None outside blocks."""
        block = self.blocks.block_of[self.stages[slot]]
        return self.block_group[block] if block >= 0 else None

    def run_key(self, slot: int) -> Hashable:
        """Return a key that is equal for slots that run together."""
        return ("run", *self._slot_key(slot))

    def retention_key(self, slot: int, value: int) -> Hashable:
        """Return a key that is equal for values that are retained together after their slots."""
        return (
            "hold",
            *self._slot_key(slot),
            *self._operation_key(slot, self.graph.producer[value]),
            self._output_index(value),
        )

    def _slot_key(self, slot: int) -> tuple[int, ...]:
        """Return a key that is equal for slots that share decisions: the same place in blocks of
        one group, for the same operation."""
        stage, op = self.stages[slot], self.slots.operations[slot]
        block = self.blocks.block_of[stage]
        place = (
            (-1, stage) if block < 0 else (self.block_group[block], self.blocks.position_of[stage])
        )
        return (*place, *self._operation_key(slot, op))

    def _operation_key(self, slot: int, op: int) -> tuple[int, int, int]:
        """Return the group, the relative block and the position of an operation, as seen from the
        block of a slot."""
        slot_block = self.blocks.block_of[self.stages[slot]]
        block = self.blocks.block_of[op]
        if slot_block < 0 or block < 0:
            return (-1, 0, op)
        return (self.block_group[block], block - slot_block, self.blocks.position_of[op])

    def _output_index(self, value: int) -> int:
        return self.graph.operations[self.graph.producer[value]].outputs.index(value)
