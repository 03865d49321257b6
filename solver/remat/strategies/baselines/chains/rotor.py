"""Optimal persistent checkpointing of a heterogeneous chain, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory (Inria RR-9302, 2019), theorem 1. The least
time to reverse stages s to t within m bytes, the state before s held and not counted:

    C(s, t, m) = min of
        min over s < j <= t of   advance s to j - 1  +  C(j, t, m - a_{j-1})  +  C(s, j - 1, m)
        tape s and keep that:    C(s + 1, t, m - abar_s)

as far as what runs meanwhile fits m. It departs from the paper in what is counted. Every stage is
taped exactly once, so that is a constant; the first run of a stage happens anyway, so to advance
it first means that its tape costs a recomputation later (`tape_s`), and to advance it again costs
`advance_s`. Hence two tables, `first` and `again`.
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
from remat.strategies.baselines.chains.chain import Chain, ChainScheduleWriter
from remat.strategies.baselines.chains.chain_costs import ChainCosts, Floats
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.options import Checked, between

_ALLOWANCE = 1.25
"""Sizes are rounded up and the peaks of different stages need not meet, so a schedule for more
than the budget may fit it: the simulator decides."""

_KEEP = 0
"""The choice to keep a tape; any other is the stage to advance to."""


@dataclass(frozen=True)
class Rotor(Checked):
    """Beaumont's dynamic program, memory counted in `slots` pieces.

    Optimal among persistent schedules (a checkpoint stays until it is used) that keep of a stage
    its state, its whole tape, or nothing.
    """

    slots: Annotated[int, between(1, 10_000)] = 500
    name = "rotor"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting of the program's schedules, one for each cost in its table. Raises
        `RematError` if the graph is no chain, `InfeasibleBudget` where none fits."""
        chain, budget_bytes = Chain.of(task.graph, strategy=self.name), task.budget_bytes
        costs = ChainCosts.of(chain)
        most_bytes = _keep_all_bytes(costs, self.slots)
        limits_bytes = [most_bytes]
        if budget_bytes is not None and budget_bytes * _ALLOWANCE < most_bytes:
            # A finer unit where the budget is; the wide table also says what the least peak is.
            limits_bytes = [int(budget_bytes * _ALLOWANCE), most_bytes]
        tables = (self._candidates(chain, costs, limit) for limit in limits_bytes)
        candidates = itertools.chain.from_iterable(tables)
        return select_cheapest(task, candidates, strategy=self.name, is_sorted=True)

    def _candidates(
        self, chain: Chain, costs: ChainCosts, limit_bytes: int
    ) -> Iterator[tuple[str, Schedule]]:
        unit = max(1.0, (limit_bytes - costs.reserved_bytes) / self.slots)
        program = _Tables(costs, unit, self.slots)
        end = len(chain.stages) - 1
        levels = program.first[0, end]
        for m in range(self.slots, -1, -1):
            if np.isfinite(levels[m]) and (m == 0 or levels[m - 1] > levels[m]):
                sweep = ChainScheduleWriter(chain)
                program.write(sweep, 0, end, m, is_first=True)
                yield f"{m} of {self.slots} slots", sweep.schedule()


def _keep_all_bytes(costs: ChainCosts, slots: int) -> int:
    """Enough to keep every tape, rounded up to pieces of that by `slots`."""
    peak = max(np.max(costs.held_bytes + costs.tape_bytes), np.max(costs.backward_bytes))
    dynamic = float(np.sum(costs.saved_bytes) + peak)
    pieces = max(slots - len(costs.saved_bytes) - 1, slots // 2, 1)
    return costs.reserved_bytes + int(dynamic * slots / pieces) + slots


class _Tables:
    """The two tables and the choices behind them."""

    def __init__(self, costs: ChainCosts, unit_bytes: float, slots: int) -> None:
        self.costs = costs
        self.slots = slots
        self._unit_bytes = unit_bytes
        self._state = [self._pieces(size) for size in costs.state_bytes]
        self._saved = [self._pieces(size) for size in costs.saved_bytes]
        length = len(self._state)
        self.first: dict[tuple[int, int], Floats] = {}
        self.again: dict[tuple[int, int], Floats] = {}
        self._choices: dict[tuple[bool, int, int], npt.NDArray[np.int16]] = {}
        for span in range(length):
            for s in range(length - span):
                self._fill(s, s + span)

    def write(self, sweep: ChainScheduleWriter, s: int, t: int, m: int, *, is_first: bool) -> None:
        """The schedule that the tables say is the cheapest for stages s to t within m pieces."""
        if s == t:
            sweep.tape(s, with_state=False)
            sweep.backward(s)
            return
        choice = int(self._choices[is_first, s, t][m])
        if choice == _KEEP:
            sweep.tape(s, with_state=True)
            self.write(sweep, s + 1, t, m - self._saved[s], is_first=is_first)
            sweep.backward(s)
            return
        for number in range(s, choice):
            sweep.advance(number)
            if number > s:
                sweep.drop(number - 1)
        self.write(sweep, choice, t, m - self._state[choice - 1], is_first=is_first)
        sweep.drop(choice - 1)
        self.write(sweep, s, choice - 1, m, is_first=False)

    def _fill(self, s: int, t: int) -> None:
        costs = self.costs
        held = costs.held_bytes[t]
        if s == t:
            least = self._pieces(max(held + costs.tape_bytes[s], costs.backward_bytes[s]))
            self.first[s, t] = self.again[s, t] = self._above(np.zeros(self.slots + 1), least)
            return
        least = self._pieces(max(held + costs.tape_bytes[s], costs.backward_bytes[s]))
        rows: list[tuple[Floats, Floats]] = []
        extra_s = costs.both_s[s] - costs.tape_s[s]
        for table, keep_s in ((self.first, 0.0), (self.again, extra_s)):
            rest = _shifted(table[s + 1, t], self._saved[s]) + keep_s
            rows.append((self._above(rest, least), table[s + 1, t]))
        options = {False: [rows[1][0]], True: [rows[0][0]]}
        peak = first_s = again_s = 0.0
        for j in range(s + 1, t + 1):
            before = costs.state_bytes[j - 2] if j - 1 > s else 0.0
            peak = max(peak, before + costs.advance_bytes[j - 1])
            first_s += costs.tape_s[j - 1]
            again_s += costs.advance_s[j - 1]
            state = self._state[j - 1]
            least = self._pieces(held + peak)
            left = self.again[s, j - 1]
            options[True].append(
                self._above(_shifted(self.first[j, t], state) + left + first_s, least)
            )
            options[False].append(
                self._above(_shifted(self.again[j, t], state) + left + again_s, least)
            )
        for is_first, table in ((True, self.first), (False, self.again)):
            stacked = np.stack(options[is_first])
            best = np.argmin(stacked, axis=0)
            table[s, t] = np.take_along_axis(stacked, best[None], axis=0)[0]
            self._choices[is_first, s, t] = np.where(best == 0, _KEEP, s + best).astype(np.int16)

    def _pieces(self, size_bytes: float) -> int:
        return int(np.ceil(size_bytes / self._unit_bytes))

    def _above(self, row: Floats, least: int) -> Floats:
        """`row` where at least that many pieces are there, infinite elsewhere."""
        row = row.copy()
        row[: min(max(least, 0), len(row))] = np.inf
        return row


def _shifted(row: Floats, by: int) -> Floats:
    """`row[m - by]`, infinite where that is less than nothing."""
    if by == 0:
        return row
    moved = np.full(len(row), np.inf)
    if by < len(row):
        moved[by:] = row[:-by]
    return moved
