"""`Profile`: a sequence of runs under change, with its memory and time kept up to date.

The runs stand in slots, some of them empty, so that a run that comes or goes moves no other. For
every value the slots that make it and those that read it are kept sorted; the life of each copy
follows from them by the rules of `remat.simulate`. Moving, adding or removing one run changes the
lives of its own operands only, each by one or two intervals, and one addition over the slots
between gives the new excess over the budget (the idea of FastSA, NeurIPS 2023, there with a
segment tree).

Memory is held in floats: exact while all sizes together stay under 2**50 bytes. What is overwritten
counts beside what is written over it, which may be too much: compiled training steps overwrite, and
their order is not searched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from remat.graph import Graph
from remat.heuristics.annealing.lives import Span, last_read, make, read, unmake, unread

SPREAD = 3
"""Slots for each run."""

_EMPTY = float(2**51)
"""Taken off the memory of an empty slot, so that it is never over a budget."""

_Step = tuple[int, int, int]
"""Operation, slot that it leaves, slot that it takes; -1 where it is added or removed."""


class Profile:
    """Runs in slots. `move`, `add` and `drop` prepare a change, in any number; `weigh` says what
    it does to the excess; `keep` or `undo` ends it. The caller sees to it that every reader still
    comes after a maker: between `places.earliest` and `places.latest` it does.

    `excess_bytes` is the sum over all runs of the bytes over the budget.
    """

    def __init__(self, graph: Graph, budget_bytes: int, runs: Sequence[int]) -> None:
        self.graph = graph
        self.size = [float(value.size_bytes) for value in graph.values]
        self.cost = [operation.cost_s for operation in graph.operations]
        self.work = [float(operation.workspace_bytes) for operation in graph.operations]
        self.producer = graph.producer
        self.inputs = [operation.inputs for operation in graph.operations]
        self.outputs = [operation.outputs for operation in graph.operations]
        self.is_result = [v in graph.results for v in range(len(graph.values))]
        self.held = [
            tuple(v for v in inputs if self.size[v] and not self.is_result[v])
            for inputs in self.inputs
        ]
        self._made = [tuple(v for v in outputs if self.size[v]) for outputs in self.outputs]
        self.lay_out(runs, budget_bytes)

    def lay_out(self, runs: Sequence[int], budget_bytes: int) -> None:
        """Start from these runs, evenly spread."""
        self.budget_bytes = budget_bytes
        count = SPREAD * len(runs) + SPREAD
        self.slots = [-1] * count
        self.at: list[list[int]] = [[] for _ in self.inputs]
        self.reads: list[list[int]] = [[] for _ in self.size]
        over = np.full(count, self.graph.constant_bytes - budget_bytes - _EMPTY, dtype=np.float64)
        self.over = over
        self.time_s = 0.0
        self.again: list[int] = []
        for turn, op in enumerate(runs):
            slot = SPREAD * turn + SPREAD // 2
            self.slots[slot] = op
            if self.at[op]:
                self.again.append(op)
            self.at[op].append(slot)
            for v in self.inputs[op]:
                self.reads[v].append(slot)
            over[slot] += _EMPTY + self.work[op]
            self.time_s += self.cost[op]
        for v, size in enumerate(self.size):
            for start, end in self._lives(v):
                over[start : end + 1] += size
        self.excess_bytes = _excess(over)
        self._reset()

    @property
    def runs(self) -> list[int]:
        """The operations in the order in which they run."""
        return [op for op in self.slots if op >= 0]

    def peak_bytes(self) -> int:
        """The largest memory of any run."""
        return int(self.over.max()) + self.budget_bytes

    def shift_budget(self, budget_bytes: int) -> None:
        """Another budget for the same runs."""
        self.over += self.budget_bytes - budget_bytes
        self.budget_bytes = budget_bytes
        self.excess_bytes = _excess(self.over)

    def move(self, slot: int, target: int) -> None:
        """Take the run in `slot` to `target`, which is empty."""
        self.settle()
        op = self.slots[slot]
        at, reads, sizes, producer = self.at, self.reads, self.size, self.producer
        spans = self._spans
        for v in self.held[op]:
            own, readers = at[producer[v]], reads[v]
            if len(own) > 1:
                unread(sizes[v], own, readers, slot, spans)
                read(sizes[v], own, readers, target, spans, gone=slot)
                continue
            end = readers[-1]
            if slot == end:
                if target > slot:
                    spans.append((end + 1, target + 1, sizes[v]))
                else:
                    last = readers[-2] if len(readers) > 1 else own[0]
                    spans.append((max(last, target) + 1, end + 1, -sizes[v]))
            elif target > end:
                spans.append((end + 1, target + 1, sizes[v]))
        own = at[op]
        for v in self._made[op]:
            readers = reads[v]
            if len(own) > 1:
                rest = [s for s in own if s != slot]
                self._unmake(v, own, slot)
                self._make(v, rest, target)
            elif readers or self.is_result[v]:
                if target < slot:
                    spans.append((target, slot, sizes[v]))
                else:
                    spans.append((slot, target, -sizes[v]))
            else:
                self._points.append((slot, -sizes[v]))
                self._points.append((target, sizes[v]))
        self._points.append((slot, -_EMPTY - self.work[op]))
        self._points.append((target, _EMPTY + self.work[op]))
        self._waiting = (op, slot, target)

    def add(self, op: int, slot: int) -> None:
        """Run `op` once more, in `slot`, which is empty."""
        self.settle()
        for v in self.held[op]:
            read(self.size[v], self.at[self.producer[v]], self.reads[v], slot, self._spans)
        for v in self._made[op]:
            self._make(v, self.at[op], slot)
        self._points.append((slot, _EMPTY + self.work[op]))
        self.extra_s += self.cost[op]
        self._waiting = (op, -1, slot)

    def drop(self, slot: int) -> None:
        """Do without the run in `slot`, one of several of its operation."""
        self.settle()
        op = self.slots[slot]
        for v in self.held[op]:
            unread(self.size[v], self.at[self.producer[v]], self.reads[v], slot, self._spans)
        for v in self._made[op]:
            self._unmake(v, self.at[op], slot)
        self._points.append((slot, -_EMPTY - self.work[op]))
        self.extra_s -= self.cost[op]
        self._waiting = (op, slot, -1)

    def weigh(self) -> float:
        """By how much the change raises the excess, in bytes summed over the runs."""
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
        old = self.over[low:high]
        new = old.copy()
        for start, end, size in spans:
            new[start - low : end - low] += size
        for slot, size in points:
            new[slot - low] += size
        self._low, self._new = low, new
        delta = _excess(new)
        if self.excess_bytes:
            delta -= _excess(old)
        self._delta = delta
        return delta

    def keep(self) -> None:
        """Make the weighed change."""
        self.settle()
        low, new = self._low, self._new
        self.over[low : low + len(new)] = new
        self.excess_bytes += self._delta
        self.time_s += self.extra_s
        for op, slot, target in self._done:
            if slot < 0:
                self.again.append(op)
            elif target < 0:
                self.again.remove(op)
        self._reset()

    def undo(self) -> None:
        """Forget the change."""
        self._waiting = None
        for op, slot, target in reversed(self._done):
            self._shift(op, target, slot)
        self._reset()

    def _reset(self) -> None:
        self._spans: list[Span] = []
        self._points: list[tuple[int, float]] = []
        self._waiting: _Step | None = None
        self._done: list[_Step] = []
        self.extra_s = 0.0

    def settle(self) -> None:
        """Enter the last step into the lists, on which the next one builds."""
        if self._waiting is not None:
            self._shift(*self._waiting)
            self._done.append(self._waiting)
            self._waiting = None

    def _shift(self, op: int, slot: int, target: int) -> None:
        reads = self.reads
        if slot >= 0:
            self.slots[slot] = -1
            self.at[op].remove(slot)
            for v in self.inputs[op]:
                readers = reads[v]
                del readers[bisect_left(readers, slot)]
        if target >= 0:
            self.slots[target] = op
            insort(self.at[op], target)
            for v in self.inputs[op]:
                insort(reads[v], target)

    def _make(self, v: int, own: list[int], slot: int) -> None:
        size, points = self.size[v], self._points
        if not self.is_result[v]:
            make(size, own, self.reads[v], slot, self._spans)
        elif own[0] < slot:
            points.append((slot, size))
        else:
            # The copy that was first is now one that is dropped after its run.
            self._spans.append((slot, own[0], size))
            points.append((own[0], size))

    def _unmake(self, v: int, own: list[int], slot: int) -> None:
        size, points = self.size[v], self._points
        if not self.is_result[v]:
            unmake(size, own, self.reads[v], slot, self._spans)
        elif own[0] < slot:
            points.append((slot, -size))
        else:
            self._spans.append((slot, own[1], -size))
            points.append((own[1], -size))

    def _lives(self, v: int) -> list[tuple[int, int]]:
        own, readers = self.at[self.producer[v]], self.reads[v]
        if self.is_result[v]:
            return [(own[0], len(self.slots) - 1)] + [(slot, slot) for slot in own[1:]]
        return [(slot, last_read(own, readers, k)) for k, slot in enumerate(own)]


def _excess(over: np.ndarray) -> float:
    return float(np.add.reduce(np.maximum(over, 0.0)))
