"""Schedules of networks of identical blocks, from programs in which blocks decide together.

At 7,000 operations a program over slots that are fine enough has tens of thousands of binaries. But
neighbouring blocks want the same, except for what memory leaves them. So a few groups of blocks
decide once each (`remat.milp.ties`). Blocks go by twos: where the value between two blocks is
dropped, the second has to be made again from the first. One group after the other is solved, with
all slots on offer, while the others run again what they do: a few hundred binaries whatever the
depth. Then the groups are split, and it starts over. What comes out fits the graph as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from remat.errors import RematError
from remat.graph import Graph
from remat.milp import identical_blocks, slots
from remat.milp.identical_blocks import Repeats
from remat.milp.slots import Slots
from remat.milp.ties import Ties
from remat.schedule import Schedule
from remat.strategies.base import Task
from remat.strategies.baselines.per_block import PerBlock
from remat.strategies.search.deadline import Clock
from remat.strategies.search.runner import MilpRunner
from remat.strategies.search.state import Known

_LARGE = 5_000
"""Operations from which on a graph is looked at: smaller ones are solved well as they are, and this
would only take their time."""

_BLOCKS = 16
_WIDTH = 2
_GROUPS = (3, 6, 12)
"""Of alike pairs of blocks, beside the first and the last pair, which decide for themselves. Each
number divides the next, so that groups can go on from what larger ones decided."""

_EVERY = 24
_IDLE = 4
"""Of a block's forward pass: a value that lies idle for so small a part is no question."""

_REGION = 2.2
"""Blocks, in operations of their forward pass: within so many an operation runs again once."""

_WELL = 0.1
"""Of the gap: to what the programs are solved, and what a level has to win for another."""

_WINDOW_S = 8.0
_LEAST_S = 0.5


def blocks_to_tie(graph: Graph) -> Repeats | None:
    """The blocks of a large graph; None where there are too few."""
    return identical_blocks.find(graph, _BLOCKS) if len(graph) >= _LARGE else None


def tie_blocks(blocks: Repeats, known: Known, clock: Clock) -> None:
    """What identical blocks that decide together come to. It uses the room to the last byte, so
    nothing is set aside then."""
    found = tied_schedule(known.runner, blocks, known.budget_bytes, clock, known.is_enough)
    if found is not None:
        known.offer([found])
        known.reserve = 0.0


def tied_schedule(
    programs: MilpRunner,
    blocks: Repeats,
    budget_bytes: int,
    clock: Clock,
    enough: Callable[[float], bool],
) -> Schedule | None:
    """The best found within the budget; None if there is none. Ends before its clock is over where
    `enough` is true of a time in seconds, or once finer groups win little."""
    graph = programs.graph
    offered = slots.periodic(
        graph,
        blocks.block,
        back=_WIDTH * blocks.length,
        every=_EVERY,
        idle=max(1, blocks.length // _IDLE),
        region=int(_REGION * _WIDTH * blocks.length),
    )
    best = _per_block(programs, offered, budget_bytes)
    gap = _WELL * programs.options.gap
    for level in _levels(graph, blocks, offered):
        before_s = math.inf if best is None else programs.time(best)
        for number in range(max(level.group), -1, -1):
            # From the last blocks on, which have the most room for what they make again.
            left = min(_WINDOW_S, clock.left_s)
            is_enough = best is not None and enough(programs.time(best))
            if is_enough or left < _LEAST_S or clock.is_over():
                return best
            free = range(len(offered))
            if best is not None:
                window = {s for s in free if level.group_at(s) in (number, None)}
                free = window.union(offered.locate(best) or ())
            ties = level.over(offered.only(free))
            found = programs.solve_tied(ties, budget_bytes, best, left, enough, gap)
            if found is not None and programs.peak(found) <= budget_bytes:
                best = found if best is None else min(best, found, key=programs.time)
        if best is None or before_s - programs.time(best) < gap * programs.time(best):
            return best
    return best


def _levels(graph: Graph, blocks: Repeats, offered: Slots) -> Iterator[Ties]:
    """Ties of fewer and fewer blocks."""
    pairs = identical_blocks.merged(blocks, _WIDTH)
    inner = pairs.count - 2
    for count in _GROUPS:
        if inner < 2 * count:
            return
        group = (0, *(1 + i * count // inner for i in range(inner)), count + 1)
        yield Ties.of(graph, pairs, offered, group)


def _per_block(programs: MilpRunner, offered: Slots, budget_bytes: int) -> Schedule | None:
    """Checkpointing each block, which treats all of them alike, if it fits."""
    try:
        schedule = PerBlock().run(Task(programs.graph)).schedule
    except RematError:
        return None
    if programs.peak(schedule) > budget_bytes or offered.locate(schedule) is None:
        return None
    return schedule
