"""Random changes to a `ScheduleProfile` that annealing may try.

Each function prepares one change with `ScheduleProfile.move`, `add` and `drop`, and returns True if
it found one; the caller evaluates it and commits or reverts it. All of them lead from valid
sequences to valid ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from remat.heuristics.annealing.schedule_profile import (
    ScheduleProfile,
    copy_slot,
    earliest_slot,
    first_reader,
    has_later_reader,
    last_event_before,
    latest_slot,
    next_reader_of_idle,
)

Move = Callable[[ScheduleProfile, Random], bool]

_MAX_DEPTH = 4
"""Operations in a row that a recomputation may need recomputed before it."""

_MAX_TRIES = 40
"""Random values that are tried for eviction at a given slot; most of them are not in memory."""


def relocate_run(profile: ScheduleProfile, random: Random) -> bool:
    """Move a random run to another slot behind the copies that it reads and before its readers."""
    return _relocate_within_copies(profile, random, _random_occupied_slot(profile.slots, random))


def shift_repeated_run(profile: ScheduleProfile, random: Random) -> bool:
    """Move a random run of an operation that runs several times, like `relocate_run`."""
    slot = _random_recomputed_slot(profile, random)
    return slot >= 0 and _relocate_within_copies(profile, random, slot)


def _relocate_within_copies(profile: ScheduleProfile, random: Random, slot: int) -> bool:
    """Move the run in `slot` like `relocate_run`; False if there is no room."""
    op = profile.slots[slot]
    low, high = _movable_slots(profile, op, slot)
    if high - low < 2:
        return False
    sample = random.random()
    if sample < 0.15:
        target = low
    elif sample < 0.3:
        target = high
    elif sample < 0.65:
        target = low + int(random.random() * (high - low + 1))
    else:
        max_shift = 2 + int((high - low) * random.random() ** 3)
        target = slot + int((2 * random.random() - 1) * max_shift)
    return _move_near(profile, slot, target, low, high)


def transpose_runs(profile: ScheduleProfile, random: Random) -> bool:
    """Move a random run past a nearby slot, even where it then reads, or is read as, another
    copy."""
    slots = profile.slots
    slot = _random_occupied_slot(slots, random)
    op = slots[slot]
    low, high = earliest_slot(profile, op), latest_slot(profile, op, slot)
    max_shift = 4 + int(60 * random.random())
    target = slot + int((2 * random.random() - 1) * max_shift)
    return _move_near(profile, slot, target, low, high)


def move_neighbouring_runs(profile: ScheduleProfile, random: Random) -> bool:
    """Move a few consecutive runs by the same distance."""
    slots = profile.slots
    slot = _random_occupied_slot(slots, random)
    count = 2 + int(6 * random.random())
    moved_slots: list[int] = []
    for moved in range(slot, len(slots)):
        if slots[moved] >= 0:
            moved_slots.append(moved)
            if len(moved_slots) == count:
                break
    max_shift = 6 + int(len(slots) * random.random() ** 3)
    shift = int((2 * random.random() - 1) * max_shift)
    if shift > 0:
        moved_slots.reverse()
    has_moved = False
    for moved in moved_slots:
        op = slots[moved]
        low, high = earliest_slot(profile, op), latest_slot(profile, op, moved)
        if _move_near(profile, moved, moved + shift, low, high):
            has_moved = True
            profile.apply_pending()
    return has_moved


def add_recomputation(profile: ScheduleProfile, random: Random) -> bool:
    """Recompute a random value before one of its readers, and with it the values that it needs and
    that are no longer live."""
    slots = profile.slots
    slot = _random_occupied_slot(slots, random)
    inputs = profile.tracked_inputs[slots[slot]]
    if not inputs:
        return False
    v = inputs[int(random.random() * len(inputs))]
    return _recompute_before(profile, random, v, slot, _MAX_DEPTH)


def remove_recomputation(profile: ScheduleProfile, random: Random) -> bool:
    """Remove one of several runs of an operation."""
    slot = _random_recomputed_slot(profile, random)
    if slot < 0 or not _is_removable(profile, slot):
        return False
    profile.drop(slot)
    return True


def exchange_recomputations(profile: ScheduleProfile, random: Random) -> bool:
    """Remove one recomputation and add another."""
    if not remove_recomputation(profile, random):
        return False
    profile.apply_pending()
    add_recomputation(profile, random)
    return True


def evict_over_budget(profile: ScheduleProfile, random: Random) -> bool:
    """Evict a value in a slot that is over the budget, and recompute it before it is read."""
    if not profile.excess_bytes:
        return False
    over_slots = np.flatnonzero(profile.excess_by_slot > 0)
    return _evict_idle_value(
        profile, random, int(over_slots[int(random.random() * len(over_slots))])
    )


def swap_recomputation(profile: ScheduleProfile, random: Random) -> bool:
    """Remove one recomputation; where memory is over the budget then, evict another value."""
    slot = _random_recomputed_slot(profile, random)
    if slot < 0 or not _is_removable(profile, slot):
        return False
    op = profile.slots[slot]
    outputs = [v for v in profile.outputs[op] if profile.size[v]]
    low = 1 + max([last_event_before(profile, v, slot) for v in outputs], default=slot)
    profile.drop(slot)
    profile.apply_pending()
    if low < slot:
        size = sum(profile.size[v] for v in outputs)
        over_slots = np.flatnonzero(profile.excess_by_slot[low:slot] > -size)
        if len(over_slots):
            _evict_idle_value(
                profile, random, low + int(over_slots[int(random.random() * len(over_slots))])
            )
    return True


def _random_occupied_slot(slots: list[int], random: Random) -> int:
    """Return a random slot with a run."""
    while True:
        slot = int(random.random() * len(slots))
        if slots[slot] >= 0:
            return slot


def _random_recomputed_slot(profile: ScheduleProfile, random: Random) -> int:
    """Return the slot of a random run of an operation that runs several times, or -1."""
    if not profile.repeated:
        return -1
    run_slots = profile.run_slots[profile.repeated[int(random.random() * len(profile.repeated))]]
    return run_slots[int(random.random() * len(run_slots))]


def _is_removable(profile: ScheduleProfile, slot: int) -> bool:
    """True if every reader of this run has another copy to read."""
    return latest_slot(profile, profile.slots[slot], slot) == len(profile.slots) - 1


def _evict_idle_value(profile: ScheduleProfile, random: Random, slot: int) -> bool:
    """Recompute a random value that is idle in `slot` before it is next read; False if there is
    none."""
    count = len(profile.size)
    for _ in range(_MAX_TRIES):
        v = int(random.random() * count)
        if not profile.size[v] or profile.is_result[v]:
            continue
        reader = next_reader_of_idle(profile, v, slot)
        if reader >= 0:
            return _recompute_before(profile, random, v, reader, _MAX_DEPTH)
    return False


def _movable_slots(profile: ScheduleProfile, op: int, slot: int) -> tuple[int, int]:
    """Return the first and the last slot between the copies that the run in `slot` reads and the
    first reader of its outputs, or its operation's next run."""
    low = max([copy_slot(profile, v, slot) for v in profile.inputs[op]], default=-1) + 1
    high = first_reader(profile, op, slot) - 1
    return low, high


def _move_near(profile: ScheduleProfile, slot: int, target: int, low: int, high: int) -> bool:
    """Move a run to an empty slot at or near the target, within the limits; False if there is
    none."""
    empty = _nearest_empty(profile.slots, min(max(target, low), high), low, high)
    if empty < 0:
        return False
    profile.move(slot, empty)
    return True


def _nearest_empty(slots: list[int], target: int, low: int, high: int) -> int:
    """Return the nearest empty slot within the limits, or -1."""
    left = right = target
    while left >= low or right <= high:
        if left >= low and slots[left] < 0:
            return left
        if right <= high and slots[right] < 0:
            return right
        left -= 1
        right += 1
    return -1


def _recompute_before(
    profile: ScheduleProfile, random: Random, v: int, slot: int, depth: int
) -> bool:
    """Recompute `v` before its reader in `slot`, and up to `depth` levels of values that it needs
    and that are no longer live; False if `v` cannot be recomputed there."""
    op = profile.producer[v]
    if profile.is_result[v] or not profile.graph.operations[op].recomputable:
        return False
    low = last_event_before(profile, v, slot) + 1
    if slot - low < 3:
        return False
    slots = profile.slots
    target = slot - 1
    if random.random() < 0.3:
        target -= int((slot - low) * random.random() ** 2)
    empty = _nearest_empty(slots, target, low, slot - 1)
    if empty < 0:
        return False
    profile.add(op, empty)
    if not depth or random.random() < 0.3:
        return True
    profile.apply_pending()
    for u in profile.tracked_inputs[op]:
        if not has_later_reader(profile, u, empty) and random.random() < 0.6:
            _recompute_before(profile, random, u, empty, depth - 1)
            profile.apply_pending()
    return True


_MOVES_PER_RESET = 20_000
"""Moves after which the slots are spread evenly again."""

_MOVES_PER_CHECK = 250
"""Moves between calls of `stop`."""


@dataclass(frozen=True, slots=True)
class CoolingSchedule:
    """Temperature and price at the first and the last move; both change by a constant factor per
    move."""

    start_temperature: float
    end_temperature: float
    start_price: float
    end_price: float


def mix_of_moves(*weighted_moves: tuple[Move, int]) -> list[Move]:
    """Return a list with each move as often as its relative frequency says."""
    return [move for move, count in weighted_moves for _ in range(count)]


def anneal(
    profile: ScheduleProfile,
    random: Random,
    cooling: CoolingSchedule,
    mix: list[Move],
    *,
    max_moves: int,
    on_fit: Callable[[ScheduleProfile], bool],
    stop: Callable[[], bool],
) -> None:
    """Change `profile` by random moves, at most `max_moves` of them.

    `on_fit` is called after every change that leaves the sequence within the budget. It may set
    another budget, and ends the search by returning True.
    """
    sample, exp = random.random, math.exp
    per_second = _inverse_mean(profile.cost)
    per_byte = _inverse_mean(profile.size)
    temperature = price = 0.0
    for move_number in range(max_moves):
        if move_number % _MOVES_PER_CHECK == 0:
            if stop():
                return
            progress = move_number / max_moves
            temperature = (
                cooling.start_temperature
                * (cooling.end_temperature / cooling.start_temperature) ** progress
            )
            price = (
                per_byte
                * cooling.start_price
                * (cooling.end_price / cooling.start_price) ** progress
            )
            if move_number % _MOVES_PER_RESET == 0:
                profile.reset(profile.runs, profile.budget_bytes)
        if not mix[int(sample() * len(mix))](profile, random):
            profile.revert()
            continue
        change = price * profile.evaluate() + per_second * profile.time_change_s
        if change <= 0 or sample() < exp(-change / temperature):
            profile.commit()
            if not profile.excess_bytes and on_fit(profile):
                return
        else:
            profile.revert()


def _inverse_mean(numbers: list[float]) -> float:
    """Return one over the mean of the numbers that are not zero; 1 without any."""
    counted = [x for x in numbers if x]
    return len(counted) / math.fsum(counted) if counted else 1.0
