"""What a schedule runs again for nothing, taken out: nobody reads it, or it could be kept."""

from __future__ import annotations

from collections import Counter

import numpy as np

from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import simulate


def prune(graph: Graph, schedule: Schedule) -> Schedule:
    """Without the recomputations whose outputs nobody reads, or whose copies before take no bytes;
    never a larger peak or cost."""
    times = Counter(schedule.runs)
    wanted = [False] * len(graph.values)
    kept: list[int] = []
    for op in reversed(schedule.runs):
        operation = graph.operations[op]
        if times[op] > 1 and not any(
            wanted[v] and v not in graph.results and graph.values[v].size_bytes > 0
            for v in operation.outputs
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


def polish(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Without the recomputations for which there is room to keep what they make, the dearest looked
    at first: no operation of the answer that takes time runs again for nothing.

    The schedule fits `budget_bytes`, or comes back without what nobody reads, and no more.
    """
    schedule = prune(graph, schedule)
    while (kept := _with_more_kept(graph, schedule, budget_bytes)) != schedule:
        schedule = prune(graph, kept)
    return schedule


def _with_more_kept(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """One look at each recomputation. What its inputs no longer take is room for the next look."""
    timeline = simulate(graph, schedule)
    is_small = max(budget_bytes, timeline.peak_bytes) < 2**62
    during_bytes = np.array(timeline.during_bytes, dtype=np.int64 if is_small else object)
    room_bytes = budget_bytes - during_bytes
    end = [copy.end for copy in timeline.copies]
    before: list[int] = []
    """The copy before each copy of the same value, -1 for the first."""
    latest = [-1] * len(graph.values)
    made: list[list[int]] = [[] for _ in schedule.runs]
    for number, copy in enumerate(timeline.copies):
        before.append(latest[copy.value])
        latest[copy.value] = number
        made[copy.start].append(number)
    gone: set[int] = set()

    def earlier(number: int) -> int:
        """The copy before that is still made."""
        number = before[number]
        while timeline.copies[number].start in gone:
            number = before[number]
        return number

    for run in _again(graph, schedule):
        # What is not read has not to be kept, and the first copy of a result is held anyway.
        read = [
            number
            for number in made[run]
            if end[number] > run and timeline.copies[number].value not in graph.results
        ]
        taken: list[tuple[slice, int]] = []
        for number in read:
            value = timeline.copies[number].value
            size_bytes = graph.values[value].size_bytes
            dead = end[earlier(number)]
            # What is written over is not there beside what is: kept, it is.
            is_over = value in graph.operations[schedule.runs[dead]].overwrites
            idle = slice(dead + (not is_over), run + 1)
            room_bytes[idle] -= size_bytes
            taken.append((idle, size_bytes))
        if all(room_bytes[idle].min(initial=0) >= 0 for idle, _ in taken):
            gone.add(run)
            for number in read:
                end[earlier(number)] = end[number]
        else:
            for idle, size_bytes in taken:
                room_bytes[idle] += size_bytes
    return Schedule.of(op for run, op in enumerate(schedule.runs) if run not in gone)


def _again(graph: Graph, schedule: Schedule) -> list[int]:
    """Runs that are recomputations and take time, the dearest first."""
    seen: set[int] = set()
    found: list[tuple[float, int]] = []
    for run, op in enumerate(schedule.runs):
        cost_s = graph.operations[op].cost_s
        if op in seen and cost_s > 0:
            found.append((-cost_s, run))
        seen.add(op)
    return [run for _, run in sorted(found)]
