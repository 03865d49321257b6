"""Ties between the slots of identical blocks: they run together, or not at all.

Neighbouring blocks form a group. What the program decides for one block of a group it decides for
all of them, so there is one variable for each group where there was one for each block. Memory is
still summed over all blocks and all values. Within a group it grows or shrinks by the same bytes
from block to block, so it is highest in the first or the last, and rows are written for these, not
for those between. Whatever the program finds is one of the
untied program's schedules, and the simulator says whether it fits; its bound says nothing about
other schedules.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise

from remat.graph import Graph
from remat.milp.identical_blocks import Repeats
from remat.milp.slots import Slots


@dataclass(frozen=True)
class Ties:
    """Classes of slots, and of what is held after them; `written` says of each slot whether its
    rows are."""

    graph: Graph
    repeats: Repeats
    group: tuple[int, ...]
    """The group of each block."""
    slots: Slots
    stages: tuple[int, ...]
    """The first run that each slot comes before, or is."""
    written: tuple[bool, ...]

    @classmethod
    def of(cls, graph: Graph, repeats: Repeats, slots: Slots, group: tuple[int, ...]) -> Ties:
        """The ties of these groups of blocks."""
        stages = [0] * len(slots)
        stage = 0
        for slot in range(len(slots) - 1, -1, -1):
            if not slots.optional[slot]:
                stage = slots.operations[slot]
            stages[slot] = stage
        ties = cls(graph, repeats, group, slots, tuple(stages), ())
        shown = ties._shown()
        return replace(ties, written=tuple(repeats.block[stage] in shown for stage in stages))

    def _shown(self) -> set[int]:
        """Blocks for which rows are written: those at the ends of a group (and the second, as the
        first may read from another group), and any with other classes of slots than a neighbour."""
        seen: list[list[Hashable]] = [[] for _ in self.group]
        for slot, stage in enumerate(self.stages):
            if self.repeats.block[stage] >= 0:
                seen[self.repeats.block[stage]].append(self._where(slot))
        shown = {-1, 0, len(self.group) - 1}
        for block, (before, after) in enumerate(pairwise(self.group)):
            if before != after:
                shown |= {block, block + 1, block + 2}
            elif seen[block] != seen[block + 1]:
                shown |= {block, block + 1}
        return shown

    def over(self, slots: Slots) -> Ties:
        """The same ties over other slots."""
        return Ties.of(self.graph, self.repeats, slots, self.group)

    def group_at(self, slot: int) -> int | None:
        """The group of the block that a slot is in; None outside."""
        block = self.repeats.block[self.stages[slot]]
        return self.group[block] if block >= 0 else None

    def run_class(self, slot: int) -> Hashable:
        """Equal for slots that run together."""
        return ("run", *self._where(slot))

    def hold_class(self, slot: int, value: int) -> Hashable:
        """Equal for values held together after slots."""
        return (
            "hold",
            *self._where(slot),
            *self._what(slot, self.graph.producer[value]),
            self._nth(value),
        )

    def _where(self, slot: int) -> tuple[int, ...]:
        stage, op = self.stages[slot], self.slots.operations[slot]
        block = self.repeats.block[stage]
        at = (-1, stage) if block < 0 else (self.group[block], self.repeats.place[stage])
        return (*at, *self._what(slot, op))

    def _what(self, slot: int, op: int) -> tuple[int, int, int]:
        """An operation as seen from the block that a slot is in."""
        seen, block = self.repeats.block[self.stages[slot]], self.repeats.block[op]
        if seen < 0 or block < 0:
            return (-1, 0, op)
        return (self.group[block], block - seen, self.repeats.place[op])

    def _nth(self, value: int) -> int:
        return self.graph.operations[self.graph.producer[value]].outputs.index(value)
