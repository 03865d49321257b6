"""Optimal checkpointing of a chain: Revolve for stages of equal cost, Rotor for any.

Griewank, Walther: Algorithm 799: revolve (ACM TOMS 26, 2000). With c checkpoints, the state before
the first stage among them, a chain of l stages is reversed with

    t(l, c) = r l - C(c + r, r - 1)        r the smallest with C(c + r, c) >= l

runs of a stage that only advance the state; each stage runs once more to write its tape. No
schedule with c checkpoints takes fewer, for stages of equal cost.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory (Inria RR-9302, 2019), theorem 1. The least
time to reverse stages s to t within m bytes, the state before s retained and not counted:

    C(s, t, m) = min of
        min over s < j <= t of   advance s to j - 1  +  C(j, t, m - a_{j-1})  +  C(s, j - 1, m)
        tape s and retain that:  C(s + 1, t, m - abar_s)

as far as the peaks of these runs fit m. `Rotor` departs from the paper in what is counted. Every
stage runs for its tape exactly once, so that is a constant; the first run of a stage is needed
anyway, so to advance it first means that its tape costs a recomputation later (`tape_s`), and to
advance it later costs `advance_s`. Hence two tables, `first` and `later`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.option_types import Checked, between
from remat.strategies.published.chain import Chain, ChainCosts, ChainScheduleWriter, Floats


@dataclass(frozen=True)
class Revolve(Checked):
    """Binomial checkpointing with `checkpoints` retained states, or the best number if that is
    None.

    Optimal for stages of equal time and size whose tape is as small as a state. Stages of networks
    are not like that: see `Rotor`.
    """

    checkpoints: Annotated[int, between(1, 1_000_000)] | None = None
    name = "revolve"

    def run(self, task: Task) -> Solution:
        """Return the cheapest number of checkpoints that fits. Raises `RematError` if the graph is
        no chain, `InfeasibleBudget` if no number fits."""
        chain = Chain.of(task.graph, strategy=self.name)
        return select_cheapest(task, self._candidates(chain), strategy=self.name)

    def _candidates(self, chain: Chain) -> Iterator[tuple[str, Schedule]]:
        length = len(chain.stages)
        checkpoint_counts = (
            range(length, 0, -1) if self.checkpoints is None else [min(self.checkpoints, length)]
        )
        splits = _advance_lengths(length, max(checkpoint_counts))
        for checkpoints in checkpoint_counts:
            writer = ChainScheduleWriter(chain)
            _reverse_stages(writer, splits, 0, length, checkpoints)
            yield f"c={checkpoints}", writer.schedule()


def _advance_lengths(length: int, checkpoints: int) -> list[list[int]]:
    """Return how many stages to advance before the next checkpoint: `[c][l]` with c checkpoints for
    l stages."""
    advances = [[stages * (stages - 1) // 2 for stages in range(length + 1)]] * 2
    splits = [[0] * (length + 1)] * 2
    for c in range(2, checkpoints + 1):
        fewest, split = [0, 0], [0, 0]
        for stages in range(2, length + 1):
            count, m = min(
                (m + advances[c - 1][stages - m] + fewest[m], m) for m in range(1, stages)
            )
            fewest.append(count)
            split.append(m)
        advances.append(fewest)
        splits.append(split)
    return splits


def _reverse_stages(
    writer: ChainScheduleWriter, splits: list[list[int]], first: int, end: int, checkpoints: int
) -> None:
    """Write the schedule that reverses the stages from `first` to before `end`. The state before
    `first` is retained, and is one of the `checkpoints`. `splits` has the `_advance_lengths`."""
    if end - first == 1:
        writer.run_for_tape(first, retains_state=False)
        writer.backward(first)
    elif checkpoints == 1:
        for last in reversed(range(first, end)):
            writer.advance(first, last)
            writer.run_for_tape(last, retains_state=False)
            writer.backward(last)
            if last > first:
                writer.drop(last - 1)
    else:
        middle = first + splits[checkpoints][end - first]
        writer.advance(first, middle)
        _reverse_stages(writer, splits, middle, end, checkpoints - 1)
        writer.drop(middle - 1)
        _reverse_stages(writer, splits, first, middle, checkpoints)


_BUDGET_FACTOR = 1.25
"""Sizes are rounded up and the peaks of different stages need not coincide, so a schedule for more
than the budget may fit it: the simulator decides."""

_RETAIN_TAPE = 0
"""The choice to retain a tape; any other choice is the stage to advance to."""


@dataclass(frozen=True)
class Rotor(Checked):
    """Beaumont's dynamic program, with memory counted in `slots` units.

    Optimal among persistent schedules (a checkpoint stays until it is used) that retain of a stage
    its state, its entire tape, or nothing.
    """

    slots: Annotated[int, between(1, 10_000)] = 500
    name = "rotor"

    def run(self, task: Task) -> Solution:
        """Return the cheapest of the program's schedules that fits; there is one for each cost in
        its table. Raises `RematError` if the graph is no chain, `InfeasibleBudget` if none fits."""
        chain, budget_bytes = Chain.of(task.graph, strategy=self.name), task.budget_bytes
        costs = ChainCosts.of(chain)
        max_bytes = _all_tapes_bytes(costs, self.slots)
        limits_bytes = [max_bytes]
        if budget_bytes is not None and budget_bytes * _BUDGET_FACTOR < max_bytes:
            # A finer unit near the budget; the wide table also gives the smallest peak.
            limits_bytes = [int(budget_bytes * _BUDGET_FACTOR), max_bytes]
        tables = (self._candidates(chain, costs, limit) for limit in limits_bytes)
        candidates = itertools.chain.from_iterable(tables)
        return select_cheapest(task, candidates, strategy=self.name, is_sorted=True)

    def _candidates(
        self, chain: Chain, costs: ChainCosts, limit_bytes: int
    ) -> Iterator[tuple[str, Schedule]]:
        unit = max(1.0, (limit_bytes - costs.always_live_bytes) / self.slots)
        program = _RotorCostTables(costs, unit, self.slots)
        end = len(chain.stages) - 1
        levels = program.first[0, end]
        for m in range(self.slots, -1, -1):
            if np.isfinite(levels[m]) and (m == 0 or levels[m - 1] > levels[m]):
                writer = ChainScheduleWriter(chain)
                program.write(writer, 0, end, m, is_first=True)
                yield f"{m} of {self.slots} slots", writer.schedule()


def _all_tapes_bytes(costs: ChainCosts, slots: int) -> int:
    """Return a number of bytes that is enough to retain every tape if each size is rounded up to a
    unit, which is that number divided by `slots`."""
    peak = max(np.max(costs.backward_live_bytes + costs.tape_bytes), np.max(costs.backward_bytes))
    dynamic = float(np.sum(costs.saved_bytes) + peak)
    pieces = max(slots - len(costs.saved_bytes) - 1, slots // 2, 1)
    return costs.always_live_bytes + int(dynamic * slots / pieces) + slots


class _RotorCostTables:
    """The two cost tables [stages][memory] and the choices that lead to them.

    `first` is for stages that have not run yet, `later` for stages that have.
    """

    def __init__(self, costs: ChainCosts, unit_bytes: float, slots: int) -> None:
        self.costs = costs
        self.slots = slots
        self._unit_bytes = unit_bytes
        self._state = [self._in_slots(size) for size in costs.state_bytes]
        self._saved = [self._in_slots(size) for size in costs.saved_bytes]
        length = len(self._state)
        self.first: dict[tuple[int, int], Floats] = {}
        self.later: dict[tuple[int, int], Floats] = {}
        self._choices: dict[tuple[bool, int, int], npt.NDArray[np.int16]] = {}
        for span in range(length):
            for s in range(length - span):
                self._fill(s, s + span)

    def write(self, writer: ChainScheduleWriter, s: int, t: int, m: int, *, is_first: bool) -> None:
        """Write the cheapest schedule for stages s to t within m units of memory. `is_first` is
        True if these stages have not run yet."""
        if s == t:
            writer.run_for_tape(s, retains_state=False)
            writer.backward(s)
            return
        choice = int(self._choices[is_first, s, t][m])
        if choice == _RETAIN_TAPE:
            writer.run_for_tape(s, retains_state=True)
            self.write(writer, s + 1, t, m - self._saved[s], is_first=is_first)
            writer.backward(s)
            return
        writer.advance(s, choice)
        self.write(writer, choice, t, m - self._state[choice - 1], is_first=is_first)
        writer.drop(choice - 1)
        self.write(writer, s, choice - 1, m, is_first=False)

    def _fill(self, s: int, t: int) -> None:
        costs = self.costs
        live_bytes = costs.backward_live_bytes[t]
        if s == t:
            min_slots = self._in_slots(
                max(live_bytes + costs.tape_bytes[s], costs.backward_bytes[s])
            )
            self.first[s, t] = self.later[s, t] = self._finite_from(
                np.zeros(self.slots + 1), min_slots
            )
            return
        min_slots = self._in_slots(max(live_bytes + costs.tape_bytes[s], costs.backward_bytes[s]))
        rows: list[tuple[Floats, Floats]] = []
        extra_s = costs.tape_and_state_s[s] - costs.tape_s[s]
        for table, retain_s in ((self.first, 0.0), (self.later, extra_s)):
            rest = _shift_right(table[s + 1, t], self._saved[s]) + retain_s
            rows.append((self._finite_from(rest, min_slots), table[s + 1, t]))
        options = {False: [rows[1][0]], True: [rows[0][0]]}
        peak = first_run_s = later_s = 0.0
        for j in range(s + 1, t + 1):
            before = costs.state_bytes[j - 2] if j - 1 > s else 0.0
            peak = max(peak, before + costs.advance_bytes[j - 1])
            first_run_s += costs.tape_s[j - 1]
            later_s += costs.advance_s[j - 1]
            state = self._state[j - 1]
            min_slots = self._in_slots(live_bytes + peak)
            earlier_stages = self.later[s, j - 1]
            options[True].append(
                self._finite_from(
                    _shift_right(self.first[j, t], state) + earlier_stages + first_run_s, min_slots
                )
            )
            options[False].append(
                self._finite_from(
                    _shift_right(self.later[j, t], state) + earlier_stages + later_s, min_slots
                )
            )
        for is_first, table in ((True, self.first), (False, self.later)):
            stacked = np.stack(options[is_first])
            best = np.argmin(stacked, axis=0)
            table[s, t] = np.take_along_axis(stacked, best[None], axis=0)[0]
            self._choices[is_first, s, t] = np.where(best == 0, _RETAIN_TAPE, s + best).astype(
                np.int16
            )

    def _in_slots(self, size_bytes: float) -> int:
        return int(np.ceil(size_bytes / self._unit_bytes))

    def _finite_from(self, row: Floats, min_slots: int) -> Floats:
        """Return `row` with infinity below `min_slots` units of memory."""
        row = row.copy()
        row[: min(max(min_slots, 0), len(row))] = np.inf
        return row


def _shift_right(row: Floats, by: int) -> Floats:
    """Return `row` moved to the right by so many units: `row[m - by]`, infinity where that index is
    negative."""
    if by == 0:
        return row
    moved = np.full(len(row), np.inf)
    if by < len(row):
        moved[by:] = row[:-by]
    return moved
