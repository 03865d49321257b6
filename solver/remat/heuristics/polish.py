"""Removing needless recomputations from a schedule: nothing reads them, or the value can be
retained."""

from __future__ import annotations

from collections import Counter

import numpy as np

from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import overwritten_in_run, simulate


def prune(graph: Graph, schedule: Schedule) -> Schedule:
    """Return the schedule without the recomputations whose outputs nothing reads, except
    for results and values without bytes, whose earlier copies are still in memory. Neither peak nor
    cost rises."""
    run_count = Counter(schedule.runs)
    is_read_later = [False] * len(graph.values)
    remaining: list[int] = []
    for op in reversed(schedule.runs):
        operation = graph.operations[op]
        if run_count[op] > 1 and not any(
            is_read_later[v] and v not in graph.results and graph.values[v].size_bytes > 0
            for v in operation.outputs
        ):
            run_count[op] -= 1
            continue
        run_count[op] -= 1
        remaining.append(op)
        for v in operation.outputs:
            is_read_later[v] = False
        for v in operation.inputs:
            is_read_later[v] = True
    remaining.reverse()
    return Schedule.of(remaining)


def polish(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return the schedule without the recomputations whose values can be retained within the
    budget.

    The most expensive are tried first; no recomputation that takes time and could be avoided
    remains. Where the schedule is over `budget_bytes`, nothing more is retained.
    """
    schedule = prune(graph, schedule)
    while (improved := _with_more_retained(graph, schedule, budget_bytes)) != schedule:
        schedule = prune(graph, improved)
    return schedule


def _with_more_retained(graph: Graph, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return the schedule after trying to remove each recomputation once. Values are retained
    instead, where memory is free; what the removed runs no longer read is freed by the next
    call."""
    timeline = simulate(graph, schedule)
    is_small = max(budget_bytes, timeline.peak_bytes) < 2**62
    during_bytes = np.array(timeline.during_bytes, dtype=np.int64 if is_small else object)
    free_bytes = budget_bytes - during_bytes
    end = [copy.end for copy in timeline.copies]
    overwrites = overwritten_in_run(graph, schedule)
    before: list[int] = []
    """The copy before each copy of the same value, -1 for the first."""
    latest = [-1] * len(graph.values)
    copies_of_run: list[list[int]] = [[] for _ in schedule.runs]
    for copy_index, copy in enumerate(timeline.copies):
        before.append(latest[copy.value])
        latest[copy.value] = copy_index
        copies_of_run[copy.start].append(copy_index)
    removed_runs: set[int] = set()

    def earlier_copy(copy_index: int) -> int:
        """Return the copy before, not counting those whose runs are removed."""
        copy_index = before[copy_index]
        while timeline.copies[copy_index].start in removed_runs:
            copy_index = before[copy_index]
        return copy_index

    for run in _recomputations_by_cost(graph, schedule):
        # Unread copies need not be retained, and the first copy of a result is retained anyway.
        read = [
            copy_index
            for copy_index in copies_of_run[run]
            if end[copy_index] > run and timeline.copies[copy_index].value not in graph.results
        ]
        reserved: list[tuple[slice, int]] = []
        for copy_index in read:
            value = timeline.copies[copy_index].value
            size_bytes = graph.values[value].size_bytes
            last_read = end[earlier_copy(copy_index)]
            # An overwritten value takes no memory while it is overwritten; a retained one does.
            is_overwritten = value in overwrites[last_read]
            idle = slice(last_read + (not is_overwritten), run + 1)
            free_bytes[idle] -= size_bytes
            reserved.append((idle, size_bytes))
        if all(free_bytes[idle].min(initial=0) >= 0 for idle, _ in reserved):
            removed_runs.add(run)
            for copy_index in read:
                end[earlier_copy(copy_index)] = end[copy_index]
        else:
            for idle, size_bytes in reserved:
                free_bytes[idle] += size_bytes
    return Schedule.of(op for run, op in enumerate(schedule.runs) if run not in removed_runs)


def _recomputations_by_cost(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the runs that are recomputations and take time, the most expensive first."""
    seen: set[int] = set()
    recomputations: list[tuple[float, int]] = []
    for run, op in enumerate(schedule.runs):
        cost_s = graph.operations[op].cost_s
        if op in seen and cost_s > 0:
            recomputations.append((-cost_s, run))
        seen.add(op)
    return [run for _, run in sorted(recomputations)]
