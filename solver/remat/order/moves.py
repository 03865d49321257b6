"""Random changes to a `Profile`: what the search may try.

Each function prepares one change with `Profile.move`, `add` and `drop` and says whether it found
one; the caller weighs it and keeps or undoes it. All of them lead from valid sequences to valid
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from remat.order.places import before, earliest, first_read, is_held_past, latest, owner
from remat.order.profile import Profile

Move = Callable[[Profile, Random], bool]

_DEPTH = 4
"""How many operations in a row a recomputation may need made again before it."""


def relocate(profile: Profile, random: Random) -> bool:
    """Take one run to another place between those that it reads from and those that read it."""
    slots = profile.slots
    slot = _pick(slots, random)
    op = slots[slot]
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
    inputs = profile.inputs[slots[slot]]
    if not inputs:
        return False
    v = inputs[int(random.random() * len(inputs))]
    return _repeat(profile, random, v, slot, _DEPTH)


def retire(profile: Profile, random: Random) -> bool:
    """Do without one of several runs of an operation."""
    if not profile.again:
        return False
    op = profile.again[int(random.random() * len(profile.again))]
    own = profile.at[op]
    slot = own[int(random.random() * len(own))]
    if latest(profile, op, slot) != len(profile.slots) - 1:
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


def _pick(slots: list[int], random: Random) -> int:
    while True:
        slot = int(random.random() * len(slots))
        if slots[slot] >= 0:
            return slot


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
    for u in profile.inputs[op]:
        if not is_held_past(profile, u, free) and random.random() < 0.6:
            _repeat(profile, random, u, free, depth - 1)
            profile.settle()
    return True
