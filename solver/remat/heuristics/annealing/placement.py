"""Queries on a `ScheduleProfile`: where a run may move, and which runs read its copies.

Every move within these limits leaves every reader with a copy to read, if not the one that it read
before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from remat.heuristics.annealing.schedule_profile import ScheduleProfile


def earliest_slot(profile: ScheduleProfile, op: int) -> int:
    """Return the first slot at which all inputs of `op` exist."""
    run_slots, producer = profile.run_slots, profile.producer
    return max([run_slots[producer[v]][0] for v in profile.inputs[op]], default=-1) + 1


def latest_slot(profile: ScheduleProfile, op: int, slot: int) -> int:
    """Return the last slot to which the run in `slot` may move.

    It is the last slot of all if every reader has another copy: then the run can be removed.
    """
    copies = profile.run_slots[op]
    if copies[0] != slot:
        return len(profile.slots) - 1
    reader_slots = profile.reader_slots
    first = min(
        (reader_slots[v][0] for v in profile.outputs[op] if reader_slots[v]),
        default=len(profile.slots),
    )
    if len(copies) > 1 and copies[1] < first:
        return len(profile.slots) - 1
    return first - 1


def copy_slot(profile: ScheduleProfile, v: int, slot: int) -> int:
    """Return the slot that produced the copy of `v` that is read in `slot`."""
    copies = profile.run_slots[profile.producer[v]]
    if len(copies) == 1 or profile.is_result[v]:
        return copies[0]
    return copies[bisect_left(copies, slot) - 1]


def first_reader(profile: ScheduleProfile, op: int, slot: int) -> int:
    """Return the first slot that reads an output of the run in `slot`, or the number of slots."""
    copies = profile.run_slots[op]
    until = len(profile.slots)
    if len(copies) > 1:
        reader = bisect_right(copies, slot)
        if reader < len(copies):
            until = copies[reader]
    for v in profile.outputs[op]:
        readers = profile.reader_slots[v]
        reader = bisect_right(readers, slot)
        if reader < len(readers) and readers[reader] < until:
            until = readers[reader]
    return until


def last_event_before(profile: ScheduleProfile, v: int, slot: int) -> int:
    """Return the last slot before `slot` that produces or reads `v`."""
    readers = profile.reader_slots[v]
    reader = bisect_left(readers, slot)
    last = copy_slot(profile, v, slot)
    return max(last, readers[reader - 1]) if reader else last


def has_later_reader(profile: ScheduleProfile, v: int, slot: int) -> bool:
    """True if the copy of `v` that is live in `slot` has a later reader, or lives to the end."""
    if profile.is_result[v]:
        return True
    copies, readers = profile.run_slots[profile.producer[v]], profile.reader_slots[v]
    reader = bisect_right(readers, slot)
    if reader == len(readers):
        return False
    copy = bisect_right(copies, slot)
    return copy == len(copies) or readers[reader] < copies[copy]


def next_reader_of_idle(profile: ScheduleProfile, v: int, slot: int) -> int:
    """Return the slot that next reads the copy of `v` that is idle in `slot`; -1 if none is."""
    readers = profile.reader_slots[v]
    if not readers or readers[-1] <= slot:
        return -1
    copies = profile.run_slots[profile.producer[v]]
    copy = bisect_left(copies, slot)
    if not copy or (copy < len(copies) and copies[copy] == slot):
        return -1
    reader = bisect_left(readers, slot)
    if readers[reader] == slot or (copy < len(copies) and copies[copy] < readers[reader]):
        return -1
    return readers[reader]
