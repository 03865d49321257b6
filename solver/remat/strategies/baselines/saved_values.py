"""Which forward values to save for the backward pass: by a knapsack, or by an integer program.

`Knapsack` is in the manner of torch.compile's `activation_memory_budget` (torch._functorch): of the
forward values, save those that are worth most recomputation time within a budget of bytes, and
recompute the others from the saved ones. The knapsack does not see that a value is recomputed along
with others, or from others that are not saved either.

`Selective` follows the rules of selective checkpointing in compilers (tags on a joint graph:
torch's own passes, torchtitan's): a forward value is saved, or it is recomputed in the backward
where it is first read, from saved or recomputed values, and stays until its last reader. Its
program chooses the cheapest set to recompute, with a memory row for each of many operations of the
backward: saved values that are still to be read, recomputed values, and what is live anyway. When a
value is recomputed depends on which others are, which the rows do not model; so the schedule is
simulated, and where it takes more memory, the program is solved with that much less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from remat.graph import Graph
from remat.limits.units import format_bytes
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import AT_LEAST, AT_MOST, Column, Program, SolverOutcome
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    required_forward_count,
    save_values,
    select_cheapest,
)
from remat.strategies.option_types import Checked, Seconds, Threads, between


@dataclass(frozen=True)
class Knapsack(Checked):
    """Saves forward values selected by a 0/1 knapsack, whose capacity is searched so that the
    simulated peak fits.

    An item is the outputs of one operation: its value is the operation's time, its weight their
    bytes, counted in `pieces` of the total. `choices` capacities are tried. A recomputed value
    stays until its last reader.
    """

    pieces: Annotated[int, between(1, 100_000)] = 1_000
    choices: Annotated[int, between(1, 10_000)] = 50
    name = "knapsack"

    def run(self, task: Task) -> Solution:
        """Return the cheapest choice that fits. Raises `RematError` without a backward pass, and
        `InfeasibleBudget` if no choice fits."""
        count = required_forward_count(task.graph, self.name)
        candidates = self._candidates(task.graph, count)
        return select_cheapest(task, candidates, strategy=self.name)

    def _candidates(self, graph: Graph, count: int) -> Iterator[tuple[str, Schedule]]:
        items = _knapsack_items(graph, count)
        weights_bytes = [sum(graph.values[v].size_bytes for v in outs) for _, outs in items]
        total_bytes = sum(weights_bytes)
        # Rounded up, so that the saved values never weigh more than the knapsack's capacity.
        unit = max(1, -(-total_bytes // self.pieces))
        weights = [-(-weight // unit) for weight in weights_bytes]
        capacity = sum(weights)
        is_taken = _filled_knapsack(
            [graph.operations[op].cost_s for op, _ in items], weights, capacity
        )
        for choice in range(self.choices + 1):
            remaining = capacity * (self.choices - choice) // self.choices
            saved: set[int] = set()
            for item in reversed(range(len(items))):
                if is_taken[item, remaining]:
                    saved.update(items[item][1])
                    remaining -= weights[item]
            share = 1 - choice / self.choices
            yield f"saves {share:.0%} of {total_bytes:,} bytes", save_values(graph, saved)


def _knapsack_items(graph: Graph, count: int) -> list[tuple[int, list[int]]]:
    """Return each forward operation that the backward pass may have to recompute, with the outputs
    that may be saved: they are needed, and can be recomputed."""
    builder = ScheduleBuilder(graph)
    for op in range(count):
        builder.run(op)
    builder.drop(range(len(graph.values)))
    read = [v for op in range(count, len(graph)) for v in graph.operations[op].inputs]
    recomputed = builder.missing_operations(v for v in read if graph.producer[v] < count)
    items: list[tuple[int, list[int]]] = []
    needed = {v for op in recomputed for v in graph.operations[op].inputs} | set(read)
    for op in recomputed:
        outputs = graph.operations[op].outputs
        items.append((op, [v for v in outputs if v in needed and builder.is_droppable[v]]))
    return items


def _filled_knapsack(
    gains: list[float], weights: list[int], capacity: int
) -> npt.NDArray[np.bool_]:
    """Return a mask [item, capacity]: true if the best knapsack of that capacity over the items up
    to this one takes it."""
    best = np.zeros(capacity + 1)
    is_taken = np.zeros((len(gains), capacity + 1), dtype=np.bool_)
    for item, (gain, weight) in enumerate(zip(gains, weights, strict=True)):
        gain_if_taken = best[: capacity + 1 - weight] + gain
        is_taken[item, weight:] = gain_if_taken >= best[weight:]
        best[weight:] = np.maximum(best[weight:], gain_if_taken)
    return is_taken


_GAP = 1e-3

_MAX_MEMORY_ROWS = 96
"""Operations of the backward that have a memory row."""

_SOLVER_OPTIONS = {"presolve": "off"}
"""The presolve of HiGHS 1.16 loops for some programs (GPT-2 at 80%), past its time limit."""

_GOOD_ENOUGH_SHARE = 0.005
"""A peak that is below the budget by at most this share of it is not improved on."""


@dataclass(frozen=True)
class Selective(Checked):
    """Saves the best set of forward values; the others are recomputed once.

    At most `choices` memory limits are tried, within `time_limit` seconds in total.
    """

    choices: Annotated[int, between(1, 1_000)] = 16
    time_limit: Seconds = 30.0
    threads: Threads = 2
    name = "selective"

    def run(self, task: Task) -> Solution:
        """Return the cheapest choice that fits. Raises `RematError` without a backward pass, and
        `InfeasibleBudget` if no choice fits."""
        count = required_forward_count(task.graph, self.name)
        return select_cheapest(task, self._candidates(task, count), strategy=self.name)

    def _candidates(self, task: Task, count: int) -> Iterator[tuple[str, Schedule]]:
        graph, budget_bytes = task.graph, task.budget_bytes
        save_all = save_values(graph, frozenset(range(len(graph.values))))
        yield "saves everything", save_all
        if budget_bytes is not None and peak_and_time(graph, save_all)[0] <= budget_bytes:
            return
        program = _SelectionMilp(graph, count, save_all)
        deadline = time.perf_counter() + self.time_limit
        available_bytes, fits = budget_bytes or 0, False
        for choice in range(self.choices if budget_bytes is not None else 0):
            saved = self._select(program, available_bytes, choice, deadline)
            if saved is None:
                break
            schedule = save_values(graph, saved)
            yield f"saves {_saved_size_text(graph, saved)}", schedule
            excess_bytes = peak_and_time(graph, schedule)[0] - (budget_bytes or 0)
            fits = fits or excess_bytes <= 0
            if -_GOOD_ENOUGH_SHARE * (budget_bytes or 0) <= excess_bytes <= 0:
                break
            available_bytes -= excess_bytes if excess_bytes > 0 else excess_bytes // 2
        if fits:
            return
        max_bytes = peak_and_time(graph, save_all)[0]
        for choice in range(self.choices):  # for the smallest peak: smaller and smaller limits
            available_bytes = max_bytes - max_bytes * choice // self.choices
            saved = self._select(program, available_bytes, choice, deadline)
            if saved is None:
                return
            yield f"saves {_saved_size_text(graph, saved)}", save_values(graph, saved)

    def _select(
        self, program: _SelectionMilp, available_bytes: int, choice: int, deadline: float
    ) -> frozenset[int] | None:
        left_s = (deadline - time.perf_counter()) / (self.choices - choice)
        return program.select(available_bytes, max(0.1, left_s), self.threads)


def _saved_size_text(graph: Graph, saved: frozenset[int]) -> str:
    return format_bytes(sum(graph.values[v].size_bytes for v in saved))


def _backward_read_intervals(
    graph: Graph, count: int, is_droppable: Sequence[bool]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first and the last operation of the backward that reads each forward value which
    may be dropped: directly or, if none does, for the recomputation of others.

    When others are recomputed depends on what is saved. The first read of each is taken.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def read(value: int, row_operation: int) -> None:
        if is_droppable[value]:
            first[value] = min(row_operation, first.get(value, row_operation))
            last[value] = max(row_operation, last.get(value, row_operation))

    for op in range(count, len(graph)):
        for value in graph.operations[op].inputs:
            read(value, op)
    read_directly = set(first)
    for op in reversed(range(count)):
        first_reads = [first[v] for v in graph.operations[op].outputs if v in first]
        for value in graph.operations[op].inputs if first_reads else ():
            if value not in read_directly:
                read(value, min(first_reads))
    return first, last


class _SelectionMilp:
    """A binary for each value that may be saved and for each operation that may be recomputed."""

    def __init__(self, graph: Graph, count: int, save_all: Schedule) -> None:
        self._graph, self._count = graph, count
        droppable = ScheduleBuilder(graph).is_droppable
        self._first_read, self._last_read = _backward_read_intervals(graph, count, droppable)
        self._values = sorted(self._first_read)
        self._operations = sorted({graph.producer[v] for v in self._values})
        timeline = simulate(graph, save_all)
        stride = max(1, (len(graph) - count) // _MAX_MEMORY_ROWS)
        self._row_operations = [count - 1, *range(count, len(graph), stride)]
        last_reader = {v: max(graph.consumers[v]) for v in self._values}
        sizes = {v: graph.values[v].size_bytes for v in self._values}
        self._fixed_bytes = {
            row_operation: timeline.during_bytes[row_operation]
            - sum(
                sizes[v]
                for v in self._values
                if graph.producer[v] <= row_operation <= last_reader[v]
            )
            for row_operation in self._row_operations
        }
        self._unit_bytes = max(timeline.peak_bytes, 1)

    def select(self, available_bytes: int, limit_s: float, threads: int) -> frozenset[int] | None:
        """Return the values to save within `available_bytes`; None if there are none, or none are
        found in time. The memory is a model: the schedule may take more."""
        graph = self._graph
        program = Program()
        saved = {v: program.add_binary(f"s{v}") for v in self._values}
        recomputed = {o: program.add_binary(f"r{o}") for o in self._operations}
        for v in self._values:
            if graph.consumers[v][-1] >= self._count:
                program.add_row({saved[v]: 1.0, recomputed[graph.producer[v]]: 1.0}, AT_LEAST, 1.0)
        for op in self._operations:
            for v in graph.operations[op].inputs:
                if v in saved:
                    terms = {
                        saved[v]: 1.0,
                        recomputed[graph.producer[v]]: 1.0,
                        recomputed[op]: -1.0,
                    }
                    program.add_row(terms, AT_LEAST, 0.0)
        for row_operation in self._row_operations:
            terms: dict[Column, float] = {}
            for v in self._values:
                size = graph.values[v].size_bytes / self._unit_bytes
                if self._last_read[v] >= row_operation:
                    terms[saved[v]] = size
                    if self._first_read[v] <= row_operation:
                        run = recomputed[graph.producer[v]]
                        terms[run] = terms.get(run, 0.0) + size
            row_limit = (available_bytes - self._fixed_bytes[row_operation]) / self._unit_bytes
            program.add_row(terms, AT_MOST, row_limit)
        unit_s = max((graph.operations[o].cost_s for o in self._operations), default=0.0) or 1.0
        program.costs = {x: graph.operations[o].cost_s / unit_s for o, x in recomputed.items()}
        solver = HighsSolver(gap=_GAP, time_limit=limit_s, threads=threads, options=_SOLVER_OPTIONS)
        outcome = solver.run(program.arrays()).outcome
        if outcome not in (SolverOutcome.OPTIMAL, SolverOutcome.FEASIBLE):
            return None
        return frozenset(v for v, x in saved.items() if x.is_one)
