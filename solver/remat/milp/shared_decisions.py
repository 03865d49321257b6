"""`SharedDecisions`: slots of identical blocks that have one binary variable in common.

Neighbouring blocks form a group. What the program decides for one block of a group it decides for
all of them, so there is one variable per group instead of one per block. Memory is still summed
over all blocks and all values. Within a group it grows or shrinks by the same bytes from block to
block, so it is highest in the first or the last, and only these have rows. Every solution is a
schedule of the program without shared decisions, and the simulator checks that it fits; the bound
says nothing about other schedules.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise

from remat.graph import Graph
from remat.milp.identical_blocks import IdenticalBlocks
from remat.milp.slots import Slots


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
