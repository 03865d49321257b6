"""The step for networks of many identical blocks: programs in which blocks share decisions.

At 7,000 operations a program over sufficiently fine slots has tens of thousands of binaries. But
neighbouring blocks have the same best decisions, except for what memory leaves them. So blocks form
a few groups, each with one decision (`remat.milp.identical_blocks`). Blocks are merged in pairs:
where the value between two blocks is dropped, the second has to be recomputed from the first. The
groups are solved one after the other, each with all its slots, while the others recompute what they
did before: a few hundred binaries, whatever the depth. Then the groups are split, and it starts
over. The resulting schedules fit the unmodified graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from remat.errors import RematError
from remat.graph import Graph
from remat.milp import identical_blocks, slots
from remat.milp.identical_blocks import IdenticalBlocks, SharedDecisions
from remat.milp.slots import Slots
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.base import Task
from remat.strategies.baselines.uniform import PerBlock
from remat.strategies.search.runner import MilpRunner
from remat.strategies.search.state import SearchState

_MIN_OPERATIONS = 5_000
"""Smaller graphs are solved well without this step, which would only take time."""

_MIN_BLOCKS = 16
_MERGED_BLOCKS = 2
_GROUP_COUNTS = (3, 6, 12)
"""Numbers of groups of identical pairs of blocks, level by level. The first and the last pair are
groups of their own in addition. Each number divides the next, so that groups can start from what
larger ones decided."""

_STRIDE = 24
_IDLE_DIVISOR = 4
"""A value that is idle for less than this part of a block's forward pass is not considered for
recomputation."""

_GROUP_SPAN_BLOCKS = 2.2
"""Within this many merged blocks, in operations of their forward pass, an operation is recomputed
at most once."""

_GAP_SHARE = 0.1
"""Share of the requested gap to which the programs are solved, and which a level has to win for
there to be a next one."""

_PROGRAM_TIME_LIMIT_S = 8.0
_MIN_PROGRAM_TIME_S = 0.5


def find_repeated_blocks(graph: Graph) -> IdenticalBlocks | None:
    """Return the identical blocks of a large graph; None if it is small or has too few."""
    if len(graph) < _MIN_OPERATIONS:
        return None
    return identical_blocks.find_identical_blocks(graph, _MIN_BLOCKS)


def share_block_decisions(blocks: IdenticalBlocks, state: SearchState, clock: Clock) -> None:
    """Add the best schedule in which identical blocks share decisions, if there is one.

    It uses the budget to the last byte, so no memory is reserved for small values afterwards.
    """
    schedule = identical_blocks_schedule(
        state.runner, blocks, state.budget_bytes, clock, state.is_good_enough
    )
    if schedule is not None:
        state.add_schedules([schedule])
        state.small_values_share = 0.0


def identical_blocks_schedule(
    runner: MilpRunner,
    blocks: IdenticalBlocks,
    budget_bytes: int,
    clock: Clock,
    is_good_enough: Callable[[float], bool],
) -> Schedule | None:
    """Return the best schedule within the budget in which identical blocks share decisions; None
    if there is none.

    Ends before the clock is over at a time in seconds that `is_good_enough` accepts, or once finer
    groups win little.
    """
    graph = runner.graph
    slot_set = slots.build_periodic_slots(
        graph,
        blocks.block_of,
        max_distance=_MERGED_BLOCKS * blocks.forward_length,
        stride=_STRIDE,
        min_idle=max(1, blocks.forward_length // _IDLE_DIVISOR),
        group_span=int(_GROUP_SPAN_BLOCKS * _MERGED_BLOCKS * blocks.forward_length),
    )
    best = _per_block_schedule(runner, slot_set, budget_bytes)
    gap = _GAP_SHARE * runner.options.gap
    for level in _levels_of_block_groups(graph, blocks, slot_set):
        time_before_s = math.inf if best is None else runner.time_s(best)
        for group in range(max(level.block_group), -1, -1):
            # From the last blocks on, which have the most memory for what they recompute.
            time_limit_s = min(_PROGRAM_TIME_LIMIT_S, clock.remaining_s)
            is_done = best is not None and is_good_enough(runner.time_s(best))
            if is_done or time_limit_s < _MIN_PROGRAM_TIME_S or clock.is_set():
                return best
            free_slots: set[int] | range = range(len(slot_set))
            if best is not None:
                window = {s for s in free_slots if level.group_of_slot(s) in (group, None)}
                free_slots = window.union(slot_set.locate(best) or ())
            shared = level.with_slots(slot_set.only(free_slots))
            candidate = runner.minimize_shared_cost(
                shared, budget_bytes, best, time_limit_s, is_good_enough, gap
            )
            if candidate is not None and runner.peak_bytes(candidate) <= budget_bytes:
                best = candidate if best is None else min(best, candidate, key=runner.time_s)
        if best is None or time_before_s - runner.time_s(best) < gap * runner.time_s(best):
            return best
    return best


def _levels_of_block_groups(
    graph: Graph, blocks: IdenticalBlocks, slot_set: Slots
) -> Iterator[SharedDecisions]:
    """Yield shared decisions of more and more, smaller and smaller groups of blocks. Ends where a
    group would have fewer than two pairs of blocks."""
    pairs = identical_blocks.merge_neighbouring_blocks(blocks, _MERGED_BLOCKS)
    inner = pairs.count - 2
    for count in _GROUP_COUNTS:
        if inner < 2 * count:
            return
        block_group = (0, *(1 + i * count // inner for i in range(inner)), count + 1)
        yield SharedDecisions.of(graph, pairs, slot_set, block_group)


def _per_block_schedule(runner: MilpRunner, slot_set: Slots, budget_bytes: int) -> Schedule | None:
    """Return the schedule that checkpoints each block, which treats them all alike; None if it does
    not fit, or recomputes outside of the slots."""
    try:
        schedule = PerBlock().run(Task(runner.graph)).schedule
    except RematError:
        return None
    if runner.peak_bytes(schedule) > budget_bytes or slot_set.locate(schedule) is None:
        return None
    return schedule
