"""Random changes to a `Profile`: what the search may try.

Each function prepares one change with `Profile.move`, `add` and `drop` and says whether it found
one; the caller weighs it and keeps or undoes it. All of them lead from valid sequences to valid
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from remat.heuristics.annealing.places import (
    before,
    earliest,
    first_read,
    idle_until,
    is_held_past,
    latest,
    owner,
)
from remat.heuristics.annealing.profile import Profile

Move = Callable[[Profile, Random], bool]

_DEPTH = 4
"""How many operations in a row a recomputation may need made again before it."""

_TRIES = 40
"""Values looked at for one that can be thrown out at a given place; most are not in memory."""


def relocate(profile: Profile, random: Random) -> bool:
    """Take one run to another place between those that it reads from and those that read it."""
    return _relocate(profile, random, _pick(profile.slots, random))


def shift(profile: Profile, random: Random) -> bool:
    """The same for a run of an operation that runs several times."""
    slot = _pick_again(profile, random)
    return slot >= 0 and _relocate(profile, random, slot)


def _relocate(profile: Profile, random: Random, slot: int) -> bool:
    op = profile.slots[slot]
    low, high = _window(profile, op, slot)
    if high - low < 2:
        return False
    draw = random.random()
    if draw < 0.15:
        target = low
    elif draw < 0.3:
        target = high
    elif draw < 0.65:
        target = low + int(random.random() * (high - low + 1))
    else:
        reach = 2 + int((high - low) * random.random() ** 3)
        target = slot + int((2 * random.random() - 1) * reach)
    return _move_near(profile, slot, target, low, high)


def transpose(profile: Profile, random: Random) -> bool:
    """Take one run past a nearby place, also where it then reads or serves another copy."""
    slots = profile.slots
    slot = _pick(slots, random)
    op = slots[slot]
    low, high = earliest(profile, op), latest(profile, op, slot)
    reach = 4 + int(60 * random.random())
    target = slot + int((2 * random.random() - 1) * reach)
    return _move_near(profile, slot, target, low, high)


def block(profile: Profile, random: Random) -> bool:
    """Take a few consecutive runs to another place together."""
    slots = profile.slots
    slot = _pick(slots, random)
    wanted = 2 + int(6 * random.random())
    chosen: list[int] = []
    for at in range(slot, len(slots)):
        if slots[at] >= 0:
            chosen.append(at)
            if len(chosen) == wanted:
                break
    reach = 6 + int(len(slots) * random.random() ** 3)
    shift = int((2 * random.random() - 1) * reach)
    if shift > 0:
        chosen.reverse()
    moved = False
    for at in chosen:
        op = slots[at]
        low, high = earliest(profile, op), latest(profile, op, at)
        if _move_near(profile, at, at + shift, low, high):
            moved = True
            profile.settle()
    return moved


def repeat(profile: Profile, random: Random) -> bool:
    """Make a value again before one of its readers, and with it what has gone by then."""
    slots = profile.slots
    slot = _pick(slots, random)
    held = profile.held[slots[slot]]
    if not held:
        return False
    v = held[int(random.random() * len(held))]
    return _repeat(profile, random, v, slot, _DEPTH)


def retire(profile: Profile, random: Random) -> bool:
    """Do without one of several runs of an operation."""
    slot = _pick_again(profile, random)
    if slot < 0 or not _is_spare(profile, slot):
        return False
    profile.drop(slot)
    return True


def exchange(profile: Profile, random: Random) -> bool:
    """Do without one recomputation and make another instead."""
    if not retire(profile, random):
        return False
    profile.settle()
    repeat(profile, random)
    return True


def relieve(profile: Profile, random: Random) -> bool:
    """Where memory is over the budget, throw a value out and make it again before it is read."""
    if not profile.excess_bytes:
        return False
    over = np.flatnonzero(profile.over > 0)
    return _throw_out(profile, random, int(over[int(random.random() * len(over))]))


def swap(profile: Profile, random: Random) -> bool:
    """Do without one recomputation; where memory is over the budget then, throw out something
    else."""
    slot = _pick_again(profile, random)
    if slot < 0 or not _is_spare(profile, slot):
        return False
    op = profile.slots[slot]
    made = [v for v in profile.outputs[op] if profile.size[v]]
    low = 1 + max([before(profile, v, slot) for v in made], default=slot)
    profile.drop(slot)
    profile.settle()
    if low < slot:
        size = sum(profile.size[v] for v in made)
        over = np.flatnonzero(profile.over[low:slot] > -size)
        if len(over):
            _throw_out(profile, random, low + int(over[int(random.random() * len(over))]))
    return True


def _pick(slots: list[int], random: Random) -> int:
    while True:
        slot = int(random.random() * len(slots))
        if slots[slot] >= 0:
            return slot


def _pick_again(profile: Profile, random: Random) -> int:
    """A run of an operation that runs several times, or -1."""
    if not profile.again:
        return -1
    own = profile.at[profile.again[int(random.random() * len(profile.again))]]
    return own[int(random.random() * len(own))]


def _is_spare(profile: Profile, slot: int) -> bool:
    """Whether every reader of this run has another copy to read."""
    return latest(profile, profile.slots[slot], slot) == len(profile.slots) - 1


def _throw_out(profile: Profile, random: Random, slot: int) -> bool:
    """Make a value again that is held idle in `slot`, before it is next read."""
    count = len(profile.size)
    for _ in range(_TRIES):
        v = int(random.random() * count)
        if not profile.size[v] or profile.is_result[v]:
            continue
        reader = idle_until(profile, v, slot)
        if reader >= 0:
            return _repeat(profile, random, v, reader, _DEPTH)
    return False


def _window(profile: Profile, op: int, slot: int) -> tuple[int, int]:
    """The slots between the copies that the run reads and the first run that reads its own."""
    low = max([owner(profile, v, slot) for v in profile.inputs[op]], default=-1) + 1
    high = first_read(profile, op, slot) - 1
    return low, high


def _move_near(profile: Profile, slot: int, target: int, low: int, high: int) -> bool:
    """Move to an empty slot at or near the target, within the bounds."""
    free = _free(profile.slots, min(max(target, low), high), low, high)
    if free < 0:
        return False
    profile.move(slot, free)
    return True


def _free(slots: list[int], target: int, low: int, high: int) -> int:
    """The nearest empty slot within the bounds, or -1."""
    left = right = target
    while left >= low or right <= high:
        if left >= low and slots[left] < 0:
            return left
        if right <= high and slots[right] < 0:
            return right
        left -= 1
        right += 1
    return -1


def _repeat(profile: Profile, random: Random, v: int, slot: int, depth: int) -> bool:
    op = profile.producer[v]
    if profile.is_result[v] or not profile.graph.operations[op].recomputable:
        return False
    low = before(profile, v, slot) + 1
    if slot - low < 3:
        return False
    slots = profile.slots
    target = slot - 1
    if random.random() < 0.3:
        target -= int((slot - low) * random.random() ** 2)
    free = _free(slots, target, low, slot - 1)
    if free < 0:
        return False
    profile.add(op, free)
    if not depth or random.random() < 0.3:
        return True
    profile.settle()
    for u in profile.held[op]:
        if not is_held_past(profile, u, free) and random.random() < 0.6:
            _repeat(profile, random, u, free, depth - 1)
            profile.settle()
    return True
