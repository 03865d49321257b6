"""What to save for the backward pass, by a program: everything else is made again, once.

The rules of selective checkpointing as compilers run it (tags on a joint graph: torch's own passes,
torchtitan's): a forward value is saved, or made again in the backward where it is first read, from
what is saved or was made again itself, and stays until its last reader.

The program chooses the cheapest set to make again, with a row for each of many moments of the
backward: what is saved and still to be read, what was made again, and what is there anyway. When a
value is made again depends on who else is, which the rows do not see; so the schedule is simulated,
and where it takes more than they say, the program is asked again with so much less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import pulp

from remat.graph import Graph
from remat.limits.units import format_bytes
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.outcome import Outcome
from remat.milp.solvers.pulp_versions import expression
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    select_cheapest,
    forward_count,
    required_forward_count,
)
from remat.strategies.options import Checked, Seconds, Threads, between

_GAP = 1e-3

_MOMENTS = 96
"""Of the backward that have a row."""

_NEAR = 0.005
"""A peak that is by so little below the budget is not improved on."""


@dataclass(frozen=True)
class Selective(Checked):
    """Saves the best set of forward values; the others are made again once. `choices` numbers of
    bytes are tried at most, within `time_limit` seconds together."""

    choices: Annotated[int, between(1, 1_000)] = 16
    time_limit: Seconds = 30.0
    threads: Threads = 2
    name = "selective"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting choice. Raises `RematError` without a backward pass, and
        `InfeasibleBudget` where no choice fits."""
        count = required_forward_count(task.graph, self.name)
        return select_cheapest(task, self._candidates(task, count), strategy=self.name)

    def _candidates(self, task: Task, count: int) -> Iterator[tuple[str, Schedule]]:
        graph, budget_bytes = task.graph, task.budget_bytes
        everything = saving(graph, frozenset(range(len(graph.values))))
        yield "saves everything", everything
        if budget_bytes is not None and peak_and_time(graph, everything)[0] <= budget_bytes:
            return
        program = _Program(graph, count, everything)
        ends = time.perf_counter() + self.time_limit
        room_bytes, fits = budget_bytes or 0, False
        for choice in range(self.choices if budget_bytes is not None else 0):
            saved = self._solved(program, room_bytes, choice, ends)
            if saved is None:
                break
            schedule = saving(graph, saved)
            yield f"saves {_bytes(graph, saved)}", schedule
            excess_bytes = peak_and_time(graph, schedule)[0] - (budget_bytes or 0)
            fits = fits or excess_bytes <= 0
            if -_NEAR * (budget_bytes or 0) <= excess_bytes <= 0:
                break
            room_bytes -= excess_bytes if excess_bytes > 0 else excess_bytes // 2
        if fits:
            return
        most_bytes = peak_and_time(graph, everything)[0]
        for choice in range(self.choices):  # the smallest peak: less and less room
            room_bytes = most_bytes - most_bytes * choice // self.choices
            saved = self._solved(program, room_bytes, choice, ends)
            if saved is None:
                return
            yield f"saves {_bytes(graph, saved)}", saving(graph, saved)

    def _solved(
        self, program: _Program, room_bytes: int, choice: int, ends: float
    ) -> frozenset[int] | None:
        left_s = (ends - time.perf_counter()) / (self.choices - choice)
        return program.solved(room_bytes, max(0.1, left_s), self.threads)


def _bytes(graph: Graph, saved: frozenset[int]) -> str:
    return format_bytes(sum(graph.values[v].size_bytes for v in saved))


def saving(graph: Graph, saved: frozenset[int]) -> Schedule:
    """The schedule that holds these forward values, as far as the backward reads them, and makes
    each other value again where it is first read."""
    builder = ScheduleBuilder(graph)
    count = forward_count(graph) or 0
    for op in range(count):
        builder.run(op)
    made = (v for op in range(count) for v in graph.operations[op].outputs)
    builder.drop(v for v in made if v not in saved)
    for op in range(count, len(graph)):
        builder.recompute(graph.operations[op].inputs, drops_others=False)
        builder.run(op)
    return builder.schedule()


def _read_from_to(
    graph: Graph, count: int, is_droppable: Sequence[bool]
) -> tuple[dict[int, int], dict[int, int]]:
    """When each forward value that the backward needs is first and last read there, as far as that
    does not depend on what is made again: by the backward itself, or else by what is made from it
    and read there."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def read(value: int, moment: int) -> None:
        if is_droppable[value]:
            first[value] = min(moment, first.get(value, moment))
            last[value] = max(moment, last.get(value, moment))

    for op in range(count, len(graph)):
        for value in graph.operations[op].inputs:
            read(value, op)
    itself = set(first)
    for op in reversed(range(count)):
        when = [first[v] for v in graph.operations[op].outputs if v in first]
        for value in graph.operations[op].inputs if when else ():
            if value not in itself:
                read(value, min(when))
    return first, last


class _Program:
    """A binary for each value that may be saved and each operation that may run again."""

    def __init__(self, graph: Graph, count: int, everything: Schedule) -> None:
        self._graph, self._count = graph, count
        droppable = ScheduleBuilder(graph).is_droppable
        self._first, self._last = _read_from_to(graph, count, droppable)
        self._values = sorted(self._first)
        self._operations = sorted({graph.producer[v] for v in self._values})
        timeline = simulate(graph, everything)
        stride = max(1, (len(graph) - count) // _MOMENTS)
        self._moments = [count - 1, *range(count, len(graph), stride)]
        ends = {v: max(graph.consumers[v]) for v in self._values}
        sizes = {v: graph.values[v].size_bytes for v in self._values}
        self._fixed_bytes = {
            moment: timeline.during_bytes[moment]
            - sum(sizes[v] for v in self._values if graph.producer[v] <= moment <= ends[v])
            for moment in self._moments
        }
        self._unit_bytes = max(timeline.peak_bytes, 1)

    def solved(self, room_bytes: int, limit_s: float, threads: int) -> frozenset[int] | None:
        """The values to save within that room, as far as the rows see; None where there are none,
        or none are found in time."""
        graph = self._graph
        problem = pulp.LpProblem("selective", pulp.LpMinimize)
        saved = {v: problem.add_variable(f"s{v}", 0, 1, pulp.LpInteger) for v in self._values}
        again = {o: problem.add_variable(f"r{o}", 0, 1, pulp.LpInteger) for o in self._operations}
        rows: list[tuple[str, dict[pulp.LpVariable, float], int, float]] = []
        for v in self._values:
            if graph.consumers[v][-1] >= self._count:
                terms = {saved[v]: 1.0, again[graph.producer[v]]: 1.0}
                rows.append((f"read{v}", terms, pulp.LpConstraintGE, 1.0))
        for op in self._operations:
            for v in graph.operations[op].inputs:
                if v in saved:
                    terms = {saved[v]: 1.0, again[graph.producer[v]]: 1.0, again[op]: -1.0}
                    rows.append((f"from{op}_{v}", terms, pulp.LpConstraintGE, 0.0))
        for moment in self._moments:
            terms: dict[pulp.LpVariable, float] = {}
            for v in self._values:
                size = graph.values[v].size_bytes / self._unit_bytes
                if self._last[v] >= moment:
                    terms[saved[v]] = size
                    if self._first[v] <= moment:
                        run = again[graph.producer[v]]
                        terms[run] = terms.get(run, 0.0) + size
            room = (room_bytes - self._fixed_bytes[moment]) / self._unit_bytes
            rows.append((f"at{moment}", terms, pulp.LpConstraintLE, room))
        pulp_versions.add_rows(problem, rows)
        unit_s = max((graph.operations[o].cost_s for o in self._operations), default=0.0) or 1.0
        costs = {x: graph.operations[o].cost_s / unit_s for o, x in again.items()}
        problem.setObjective(expression(costs))
        run = HighsSolver(gap=_GAP, time_limit=limit_s, threads=threads)
        outcome = run.solve(pulp_versions.read_arrays(problem)).outcome
        if outcome not in (Outcome.OPTIMAL, Outcome.FEASIBLE):
            return None
        return frozenset(v for v, x in saved.items() if (x.varValue or 0.0) > 0.5)
