"""Cheap schedules: to start a solver from, and to fall back on when it finds none in time.

A schedule here follows from a set of *dropped* values: each is freed in its longest idle spells
and made again on demand, as late as possible, from whatever is then there. Choosing the set by
cost per byte gives selective recomputation; choosing everything but every k-th cut of the graph
gives segment checkpointing (Chen et al., 2016). `polish` then takes back what turns out not to be
needed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import measure


class Rated(NamedTuple):
    """A schedule with its peak and time."""

    peak_bytes: int
    time_s: float
    schedule: Schedule

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> Rated:
        """Simulated."""
        return cls(*measure(graph, schedule), schedule)


def candidates(graph: Graph) -> list[Rated]:
    """Schedules of many kinds, without regard to any budget; `keep_all` is the first."""
    found = {Schedule.keep_all(graph): None}
    droppable = _droppable(graph)
    kept_sets = list(_kept_sets(graph, droppable))
    for idle in sorted({max(3, len(graph) // share) for share in (8, 24, 60)}):
        for kept in kept_sets:
            found[prune(graph, on_demand(graph, droppable - kept, idle))] = None
    return [Rated.of(graph, schedule) for schedule in found]


def best_within(
    graph: Graph, budget_bytes: int, rated: Iterable[Rated], seconds: float = 1.0
) -> Schedule | None:
    """The cheapest of `rated` with a peak of at most `budget_bytes`, polished; None if none."""
    fitting = [r for r in rated if r.peak_bytes <= budget_bytes]
    deadline = time.monotonic() + seconds
    polished = [
        Rated.of(graph, polish(graph, r.schedule, budget_bytes, deadline))
        for r in heapq.nsmallest(3, fitting, key=lambda r: r.time_s)
    ]
    return min(polished, key=lambda r: r.time_s).schedule if polished else None


def on_demand(graph: Graph, dropped: set[int], idle: int) -> Schedule:
    """Free each of `dropped` in its spells of more than `idle` operations; make it again on demand.

    A spell is counted between two events of the value in the graph's order; the last event begins
    one that never ends.
    """
    spells = _spells(graph, dropped, idle)
    made_at = [-1] * len(graph.values)
    runs: list[int] = []
    for op, operation in enumerate(graph.operations):
        again: set[int] = set()
        stack = list(operation.inputs)
        while stack:
            v = stack.pop()
            producer = graph.producer[v]
            if producer in again or not _freed(spells.get(v), made_at[v], op):
                continue
            again.add(producer)
            stack.extend(graph.operations[producer].inputs)
        for producer in sorted(again):
            runs.append(producer)
            for v in graph.operations[producer].outputs:
                made_at[v] = op
        runs.append(op)
        for v in operation.outputs:
            made_at[v] = op
    return Schedule.of(runs)


def prune(graph: Graph, schedule: Schedule) -> Schedule:
    """Without the recomputations whose outputs nobody reads; never a larger peak or cost."""
    times = [0] * len(graph.operations)
    for op in schedule.runs:
        times[op] += 1
    wanted = [False] * len(graph.values)
    kept: list[int] = []
    for op in reversed(schedule.runs):
        operation = graph.operations[op]
        if times[op] > 1 and not any(
            wanted[v] and v not in graph.results for v in operation.outputs
        ):
            times[op] -= 1
            continue
        times[op] -= 1
        kept.append(op)
        for v in operation.outputs:
            wanted[v] = False
        for v in operation.inputs:
            wanted[v] = True
    kept.reverse()
    return Schedule.of(kept)


def polish(graph: Graph, schedule: Schedule, budget_bytes: int, deadline: float) -> Schedule:
    """Without the recomputations that the budget does not need, the dearest tried first.

    Stops at `deadline` (of `time.monotonic`). Each trial is a simulation.
    """
    schedule = prune(graph, schedule)
    seen: set[int] = set()
    again: list[tuple[float, int]] = []
    for run, op in enumerate(schedule.runs):
        if op in seen and graph.operations[op].cost_s > 0:
            again.append((-graph.operations[op].cost_s, run))
        seen.add(op)
    gone: set[int] = set()
    for _, run in sorted(again):
        if time.monotonic() > deadline:
            break
        gone.add(run)
        trial = Schedule.of(op for r, op in enumerate(schedule.runs) if r not in gone)
        if measure(graph, trial)[0] > budget_bytes:
            gone.remove(run)
    return prune(graph, Schedule.of(op for r, op in enumerate(schedule.runs) if r not in gone))


def _droppable(graph: Graph) -> set[int]:
    return {
        v
        for v, value in enumerate(graph.values)
        if value.size_bytes > 0
        and v not in graph.results
        and graph.consumers[v]
        and graph.operations[graph.producer[v]].recomputable
    }


def _kept_sets(graph: Graph, droppable: set[int]) -> Iterator[set[int]]:
    """The values to keep: by cost per byte, then by cuts of the graph, then both."""
    price = sorted(
        droppable,
        key=lambda v: graph.operations[graph.producer[v]].cost_s / graph.values[v].size_bytes,
        reverse=True,
    )
    prefixes = [set(price[: len(price) * share // 16]) for share in range(16)]
    yield from prefixes
    cuts = _narrow_cuts(graph)
    for every in (1, 2, 3, 4, 6, 8, 12, 16):
        if every < max(2, len(cuts)):
            crossing = set[int]().union(*cuts[::every])
            for prefix in prefixes[:9:2]:
                yield crossing | prefix


def _narrow_cuts(graph: Graph) -> list[set[int]]:
    """Values alive at each place where the first half of the work is narrowest.

    "Alive" means read within the next few operations: what the forward pass still needs, not what
    it saves for the backward pass.
    """
    reach = max(4, len(graph) // 8)
    near_end = list(graph.producer)
    for v, users in enumerate(graph.consumers):
        for op in users:
            if op - near_end[v] <= reach:
                near_end[v] = op
    width = [0] * (len(graph) + 1)
    for v, end in enumerate(near_end):
        if end > graph.producer[v]:
            width[graph.producer[v] + 1] += graph.values[v].size_bytes
            width[end + 1 if end + 1 <= len(graph) else len(graph)] -= graph.values[v].size_bytes
    for op in range(1, len(width)):
        width[op] += width[op - 1]
    cuts: list[set[int]] = []
    for op in range(2, len(graph) - 1):
        if width[op] < width[op - 1] and width[op] <= width[op + 1]:
            alive = {v for v, end in enumerate(near_end) if graph.producer[v] < op <= end}
            if not cuts or cuts[-1] != alive:
                cuts.append(alive)
    return cuts


def _spells(graph: Graph, dropped: set[int], idle: int) -> dict[int, list[int]]:
    """For each dropped value, the events after which it is freed, in order."""
    spells: dict[int, list[int]] = {}
    for v in dropped:
        events = [graph.producer[v], *graph.consumers[v]]
        spells[v] = [e for e, after in pairwise(events) if after - e > idle]
        spells[v].append(events[-1])
    return spells


def _freed(spells: list[int] | None, made_at: int, op: int) -> bool:
    """Whether a value last made at `made_at` is gone by `op`.

    A copy made while recomputing after the last event serves the operation it was made for.
    """
    if spells is None:
        return False
    for start in spells:
        if start >= made_at:
            return start < op
    return made_at < op
