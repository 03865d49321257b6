"""`ScheduleProfile`: a sequence of runs that can be changed, with its memory and time kept up to
date.

The runs are in slots, some of them empty, so that adding or removing a run moves no other. For
every value the slots that produce it and those that read it are kept sorted. A copy lives from the
slot that produces it to its last reader before the next copy, by the rules of `remat.simulate`; the
first copy of a result lives to the end. Moving, adding or removing one run changes the lifetimes of
its own operands only, each by one or two intervals, and one addition over the slots between gives
the new excess over the budget (the idea of FastSA, NeurIPS 2023, there with a segment tree).

Memory is in floats: exact while all sizes together stay below 2**50 bytes. An overwritten value
counts in addition to the value written over it, which may be too much: compiled training steps
overwrite, and their order is not searched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from remat.graph import Graph

Span = tuple[int, int, float]
"""The slots from a first one up to an end, exclusive, and the bytes to add to their memory."""


def last_reader(copies: list[int], readers: list[int], copy: int, removed: int = -1) -> int:
    """Return the slot of the last reader of a copy, not counting the one in slot `removed`; the
    copy's own slot if nothing reads it. `copy` is its index."""
    last = (bisect_left(readers, copies[copy + 1]) if copy + 1 < len(copies) else len(readers)) - 1
    if last >= 0 and readers[last] == removed:
        last -= 1
    return max(copies[copy], readers[last]) if last >= 0 else copies[copy]


SLOTS_PER_RUN = 3
"""Slots for each run."""

_EMPTY_SLOT_OFFSET = float(2**51)
"""Subtracted from the memory of an empty slot, so that it is never over the budget."""

_RunChange = tuple[int, int, int]
"""Operation, the slot that it leaves, the slot that it takes; -1 where a run is added or removed.
"""


class ScheduleProfile:
    """Runs in slots. `move`, `add` and `drop` prepare a change, in any number; `evaluate` returns
    its effect on the excess; `commit` or `revert` ends it.

    The caller ensures that every reader still comes after a producer: between
    `earliest_slot` and `latest_slot` it does. `excess_bytes` is the sum over
    all runs of the bytes over the budget.
    """

    def __init__(self, graph: Graph, budget_bytes: int, runs: Sequence[int]) -> None:
        self.graph = graph
        self.size = [float(value.size_bytes) for value in graph.values]
        self.cost = [operation.cost_s for operation in graph.operations]
        self.workspace = [float(operation.workspace_bytes) for operation in graph.operations]
        self.producer = graph.producer
        self.inputs = [operation.inputs for operation in graph.operations]
        self.outputs = [operation.outputs for operation in graph.operations]
        self.is_result = [v in graph.results for v in range(len(graph.values))]
        self.tracked_inputs = [
            tuple(v for v in inputs if self.size[v] and not self.is_result[v])
            for inputs in self.inputs
        ]
        self._tracked_outputs = [
            tuple(v for v in outputs if self.size[v]) for outputs in self.outputs
        ]
        self.reset(runs, budget_bytes)

    def reset(self, runs: Sequence[int], budget_bytes: int) -> None:
        """Replace everything by these runs, evenly spread over new slots."""
        self.budget_bytes = budget_bytes
        count = SLOTS_PER_RUN * len(runs) + SLOTS_PER_RUN
        self.slots = [-1] * count
        self.run_slots: list[list[int]] = [[] for _ in self.inputs]
        self.reader_slots: list[list[int]] = [[] for _ in self.size]
        over = np.full(
            count, self.graph.constant_bytes - budget_bytes - _EMPTY_SLOT_OFFSET, dtype=np.float64
        )
        self.excess_by_slot = over
        self.time_s = 0.0
        self.repeated: list[int] = []
        for turn, op in enumerate(runs):
            slot = SLOTS_PER_RUN * turn + SLOTS_PER_RUN // 2
            self.slots[slot] = op
            if self.run_slots[op]:
                self.repeated.append(op)
            self.run_slots[op].append(slot)
            for v in self.inputs[op]:
                self.reader_slots[v].append(slot)
            over[slot] += _EMPTY_SLOT_OFFSET + self.workspace[op]
            self.time_s += self.cost[op]
        for v, size in enumerate(self.size):
            for start, end in self._copy_lifetimes(v):
                over[start : end + 1] += size
        self.excess_bytes = _total_excess_bytes(over)
        self._clear_changes()

    @property
    def runs(self) -> list[int]:
        """The operations in the order in which they run."""
        return [op for op in self.slots if op >= 0]

    def peak_bytes(self) -> int:
        """Return the largest memory of any run."""
        return int(self.excess_by_slot.max()) + self.budget_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Set another budget for the same runs."""
        self.excess_by_slot += self.budget_bytes - budget_bytes
        self.budget_bytes = budget_bytes
        self.excess_bytes = _total_excess_bytes(self.excess_by_slot)

    def move(self, slot: int, target: int) -> None:
        """Prepare moving the run in `slot` to `target`, which is empty."""
        self.apply_pending()
        op = self.slots[slot]
        at, reads, sizes, producer = self.run_slots, self.reader_slots, self.size, self.producer
        spans = self._spans
        for v in self.tracked_inputs[op]:
            copies, readers = at[producer[v]], reads[v]
            if len(copies) > 1:
                self._remove_reader(v, slot)
                self._add_reader(v, target, removed=slot)
                continue
            end = readers[-1]
            if slot == end:
                if target > slot:
                    spans.append((end + 1, target + 1, sizes[v]))
                else:
                    last = readers[-2] if len(readers) > 1 else copies[0]
                    spans.append((max(last, target) + 1, end + 1, -sizes[v]))
            elif target > end:
                spans.append((end + 1, target + 1, sizes[v]))
        copies = at[op]
        for v in self._tracked_outputs[op]:
            readers = reads[v]
            if len(copies) > 1:
                rest = [s for s in copies if s != slot]
                self._remove_copy(v, copies, slot)
                self._add_copy(v, rest, target)
            elif readers or self.is_result[v]:
                if target < slot:
                    spans.append((target, slot, sizes[v]))
                else:
                    spans.append((slot, target, -sizes[v]))
            else:
                self._points.append((slot, -sizes[v]))
                self._points.append((target, sizes[v]))
        self._points.append((slot, -_EMPTY_SLOT_OFFSET - self.workspace[op]))
        self._points.append((target, _EMPTY_SLOT_OFFSET + self.workspace[op]))
        self._pending = (op, slot, target)

    def add(self, op: int, slot: int) -> None:
        """Prepare running `op` once more, in `slot`, which is empty."""
        self.apply_pending()
        for v in self.tracked_inputs[op]:
            self._add_reader(v, slot)
        for v in self._tracked_outputs[op]:
            self._add_copy(v, self.run_slots[op], slot)
        self._points.append((slot, _EMPTY_SLOT_OFFSET + self.workspace[op]))
        self.time_change_s += self.cost[op]
        self._pending = (op, -1, slot)

    def drop(self, slot: int) -> None:
        """Prepare removing the run in `slot`, one of several of its operation."""
        self.apply_pending()
        op = self.slots[slot]
        for v in self.tracked_inputs[op]:
            self._remove_reader(v, slot)
        for v in self._tracked_outputs[op]:
            self._remove_copy(v, self.run_slots[op], slot)
        self._points.append((slot, -_EMPTY_SLOT_OFFSET - self.workspace[op]))
        self.time_change_s -= self.cost[op]
        self._pending = (op, slot, -1)

    def evaluate(self) -> float:
        """Return by how much the change raises the excess, in bytes summed over the runs."""
        points, spans = self._points, self._spans
        low, high = len(self.slots), 0
        for slot, _ in points:
            if slot < low:
                low = slot
            if slot >= high:
                high = slot + 1
        for start, end, _ in spans:
            if start < low:
                low = start
            if end > high:
                high = end
        old = self.excess_by_slot[low:high]
        new = old.copy()
        for start, end, size in spans:
            new[start - low : end - low] += size
        for slot, size in points:
            new[slot - low] += size
        self._low, self._new = low, new
        delta = _total_excess_bytes(new)
        if self.excess_bytes:
            delta -= _total_excess_bytes(old)
        self._delta = delta
        return delta

    def commit(self) -> None:
        """Make the prepared changes, after `evaluate`."""
        self.apply_pending()
        low, new = self._low, self._new
        self.excess_by_slot[low : low + len(new)] = new
        self.excess_bytes += self._delta
        self.time_s += self.time_change_s
        for op, slot, target in self._applied:
            if slot < 0:
                self.repeated.append(op)
            elif target < 0:
                self.repeated.remove(op)
        self._clear_changes()

    def revert(self) -> None:
        """Discard the prepared changes."""
        self._pending = None
        for op, slot, target in reversed(self._applied):
            self._move_run_in_lists(op, target, slot)
        self._clear_changes()

    def _clear_changes(self) -> None:
        """Forget the prepared changes."""
        self._spans: list[Span] = []
        self._points: list[tuple[int, float]] = []
        self._pending: _RunChange | None = None
        self._applied: list[_RunChange] = []
        self.time_change_s = 0.0

    def apply_pending(self) -> None:
        """Enter the last prepared change into the lists, so that the next one can build on it."""
        if self._pending is not None:
            self._move_run_in_lists(*self._pending)
            self._applied.append(self._pending)
            self._pending = None

    def _move_run_in_lists(self, op: int, slot: int, target: int) -> None:
        """Move a run in the lists of slots and readers; -1 for a slot adds or removes it."""
        reads = self.reader_slots
        if slot >= 0:
            self.slots[slot] = -1
            self.run_slots[op].remove(slot)
            for v in self.inputs[op]:
                readers = reads[v]
                del readers[bisect_left(readers, slot)]
        if target >= 0:
            self.slots[target] = op
            insort(self.run_slots[op], target)
            for v in self.inputs[op]:
                insort(reads[v], target)

    def _add_reader(self, v: int, slot: int, removed: int = -1) -> None:
        """Prepare adding a reader of `v` in `slot`; the reader in slot `removed` no longer
        counts."""
        copies = self.run_slots[self.producer[v]]
        end = last_reader(copies, self.reader_slots[v], bisect_left(copies, slot) - 1, removed)
        if slot > end:
            self._spans.append((end + 1, slot + 1, self.size[v]))

    def _remove_reader(self, v: int, slot: int) -> None:
        """Prepare removing the reader of `v` in `slot`."""
        copies, readers = self.run_slots[self.producer[v]], self.reader_slots[v]
        copy = bisect_left(copies, slot) - 1
        if last_reader(copies, readers, copy) == slot:
            start = last_reader(copies, readers, copy, slot) + 1
            self._spans.append((start, slot + 1, -self.size[v]))

    def _add_copy(self, v: int, copies: list[int], slot: int) -> None:
        """Prepare adding a copy of `v`, produced in `slot`, to those in the slots `copies`. It
        takes over the readers up to the next copy."""
        size, readers, spans = self.size[v], self.reader_slots[v], self._spans
        if self.is_result[v]:
            if copies[0] < slot:
                self._points.append((slot, size))
            else:
                # The former first copy is now one that is freed after its run.
                spans.append((slot, copies[0], size))
                self._points.append((copies[0], size))
            return
        copy = bisect_left(copies, slot) - 1
        last = bisect_left(readers, slot if copy >= 0 else copies[0]) - 1
        if copy < 0:
            spans.append((slot, max(slot, readers[last] if last >= 0 else slot) + 1, size))
        elif last_reader(copies, readers, copy) <= slot:
            spans.append((slot, slot + 1, size))
        else:
            trimmed = max(copies[copy], readers[last]) if last >= 0 else copies[copy]
            spans.append((trimmed + 1, slot, -size))

    def _remove_copy(self, v: int, copies: list[int], slot: int) -> None:
        """Prepare removing the copy of `v` in `slot`, one of several in the slots `copies`. Its
        readers take the copy before it; readers of the first copy must get another one next."""
        size, readers, spans = self.size[v], self.reader_slots[v], self._spans
        if self.is_result[v]:
            if copies[0] < slot:
                self._points.append((slot, -size))
            else:
                spans.append((slot, copies[1], -size))
                self._points.append((copies[1], -size))
            return
        copy = bisect_left(copies, slot)
        end = last_reader(copies, readers, copy)
        if copy == 0 or end == slot:
            spans.append((slot, end + 1, -size))
        else:
            spans.append((last_reader(copies, readers, copy - 1) + 1, slot, size))

    def _copy_lifetimes(self, v: int) -> list[tuple[int, int]]:
        """Return the first and the last slot of each copy of a value."""
        copies, readers = self.run_slots[self.producer[v]], self.reader_slots[v]
        if self.is_result[v]:
            return [(copies[0], len(self.slots) - 1)] + [(slot, slot) for slot in copies[1:]]
        return [(slot, last_reader(copies, readers, copy)) for copy, slot in enumerate(copies)]


def _total_excess_bytes(over: np.ndarray) -> float:
    """Return the sum of the bytes over the budget, from the excess of each slot."""
    return float(np.add.reduce(np.maximum(over, 0.0)))


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
    """Return the first slot after `slot` that reads an output of the run there, or runs its
    operation once more; the number of slots without any."""
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
    """Return the last slot before `slot` that reads `v`, or produces the copy that is live
    there."""
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
