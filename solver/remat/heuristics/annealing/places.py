"""Where the runs of a `Profile` may go, and what they have to do with each other.

Whatever these allow leaves every reader with a copy to read, if not the one it read before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from remat.heuristics.annealing.profile import Profile


def earliest(profile: Profile, op: int) -> int:
    """The first slot at which `op` finds all its inputs made."""
    at, producer = profile.at, profile.producer
    return max([at[producer[v]][0] for v in profile.inputs[op]], default=-1) + 1


def latest(profile: Profile, op: int, slot: int) -> int:
    """The last slot to which the run in `slot` may go.

    It is the last of all where every reader has another copy: then the run can be dropped.
    """
    own = profile.at[op]
    if own[0] != slot:
        return len(profile.slots) - 1
    reads = profile.reads
    first = min((reads[v][0] for v in profile.outputs[op] if reads[v]), default=len(profile.slots))
    if len(own) > 1 and own[1] < first:
        return len(profile.slots) - 1
    return first - 1


def owner(profile: Profile, v: int, slot: int) -> int:
    """The slot that made the copy of `v` that is read in `slot`."""
    own = profile.at[profile.producer[v]]
    if len(own) == 1 or profile.is_result[v]:
        return own[0]
    return own[bisect_left(own, slot) - 1]


def first_read(profile: Profile, op: int, slot: int) -> int:
    """The first slot that reads what the run in `slot` makes, or the number of slots."""
    own = profile.at[op]
    until = len(profile.slots)
    if len(own) > 1:
        k = bisect_right(own, slot)
        if k < len(own):
            until = own[k]
    for v in profile.outputs[op]:
        readers = profile.reads[v]
        k = bisect_right(readers, slot)
        if k < len(readers) and readers[k] < until:
            until = readers[k]
    return until


def before(profile: Profile, v: int, slot: int) -> int:
    """The last slot before `slot` that makes or reads `v`."""
    readers = profile.reads[v]
    k = bisect_left(readers, slot)
    last = owner(profile, v, slot)
    return max(last, readers[k - 1]) if k else last


def is_held_past(profile: Profile, v: int, slot: int) -> bool:
    """Whether the copy of `v` that is there in `slot` has a later reader, or lives for ever."""
    if profile.is_result[v]:
        return True
    own, readers = profile.at[profile.producer[v]], profile.reads[v]
    k = bisect_right(readers, slot)
    if k == len(readers):
        return False
    m = bisect_right(own, slot)
    return m == len(own) or readers[k] < own[m]


def idle_until(profile: Profile, v: int, slot: int) -> int:
    """The slot that next reads the copy of `v` that lies idle in `slot`; -1 if none does."""
    readers = profile.reads[v]
    if not readers or readers[-1] <= slot:
        return -1
    own = profile.at[profile.producer[v]]
    m = bisect_left(own, slot)
    if not m or (m < len(own) and own[m] == slot):
        return -1
    k = bisect_left(readers, slot)
    if readers[k] == slot or (m < len(own) and own[m] < readers[k]):
        return -1
    return readers[k]
