"""Wait less for copies in a solved schedule, where the budget has room.

Copies are placed before the step is solved, for the recomputations that are expected then. A
schedule that recomputes less waits for a copy back that starts too late, or for memory that it need
not free yet. Its memory is known once it is solved: where there is room, `release` runs later and
`reload` earlier. The schedule then differs from the graph's order in these runs only.
"""

from __future__ import annotations

import math

from remat.costs.devices import Link
from remat.errors import GraphError
from remat.graph import Graph
from remat.passes.offload.copies import OffloadedValue, copy_times, offloaded_values
from remat.schedule import Schedule
from remat.simulate import simulate


def with_shorter_waits(graph: Graph, schedule: Schedule, budget_bytes: int, link: Link) -> Schedule:
    """Return a schedule of a graph with copies that waits less for them, within the budget (or the
    peak, if that is larger) and with no more bytes on the host; the same schedule if that is not
    possible."""
    later = _with_later_releases(graph, schedule, budget_bytes, link)
    return _with_earlier_reloads(graph, later, budget_bytes, link)


def _with_later_releases(
    graph: Graph, schedule: Schedule, budget_bytes: int, link: Link
) -> Schedule:
    """Return the schedule in which tensors are freed where their copies to the host have ended, or
    as late as there is room for them."""
    offloaded = offloaded_values(graph)
    if not _is_waiting(graph, schedule, link, {o.release for o in offloaded}):
        return schedule
    moves = _Moves(graph, schedule, offloaded)
    run_of = {op: run for run, op in enumerate(schedule.runs)}
    end_s = 0.0
    for o in sorted(offloaded, key=lambda o: run_of[o.offload]):
        copy_s = graph.values[o.value].size_bytes / link.to_host_bytes_per_s
        end_s = max(end_s, moves.start_s(o.offload)) + copy_s
        moves.move_release(o, end_s, budget_bytes)
    return _faster(graph, schedule, moves.runs, budget_bytes, link)


def _with_earlier_reloads(
    graph: Graph, schedule: Schedule, budget_bytes: int, link: Link
) -> Schedule:
    """Return the schedule in which copies back start where they end in time, or as early as there
    is room for them."""
    offloaded = offloaded_values(graph)
    if not _is_waiting(graph, schedule, link, {o.arrive for o in offloaded}):
        return schedule
    moves = _Moves(graph, schedule, offloaded)
    run_of = {op: run for run, op in enumerate(schedule.runs)}
    next_start_s = math.inf
    for o in sorted(offloaded, key=lambda o: run_of[o.arrive], reverse=True):
        copy_s = graph.values[o.value].size_bytes / link.to_device_bytes_per_s
        next_start_s = min(next_start_s, moves.start_s(o.arrive)) - copy_s
        moves.move_reload(o, next_start_s, budget_bytes)
    return _faster(graph, schedule, moves.runs, budget_bytes, link)


def _is_waiting(graph: Graph, schedule: Schedule, link: Link, operations: set[int]) -> bool:
    names = {graph.operations[op].name for op in operations}
    waits = copy_times(graph, schedule.runs, link).waits
    return any(w.operation in names and w.end_s > w.start_s for w in waits)


def _faster(
    graph: Graph, schedule: Schedule, runs: list[int], budget_bytes: int, link: Link
) -> Schedule:
    """Return the schedule with these runs if it is faster and within the budget; else the one
    before."""
    moved = Schedule.of(runs)
    limit_bytes = max(budget_bytes, simulate(graph, schedule).peak_bytes)
    try:
        peak_bytes = simulate(graph, moved).peak_bytes
    except GraphError:
        return schedule
    before, after = (copy_times(graph, s.runs, link) for s in (schedule, moved))
    is_better = (
        peak_bytes <= limit_bytes
        and after.step_s < before.step_s
        and after.largest_host_bytes <= before.largest_host_bytes
    )
    return moved if is_better else schedule


class _Moves:
    """A schedule while runs of `release` and `reload` are moved, with the memory during each run,
    and the seconds at which each ends if nothing waits."""

    def __init__(
        self, graph: Graph, schedule: Schedule, offloaded: tuple[OffloadedValue, ...]
    ) -> None:
        self.graph = graph
        self.runs = list(schedule.runs)
        self.during_bytes = list(simulate(graph, schedule).during_bytes)
        copies = {op for o in offloaded for op in o.operations}
        self.end_s: list[float] = []
        now_s = 0.0
        for op in self.runs:
            now_s += 0.0 if op in copies else graph.operations[op].cost_s
            self.end_s.append(now_s)
        boundary = graph.boundary
        self.boundary_run = -1 if boundary is None else self.runs.index(boundary)

    def start_s(self, op: int) -> float:
        """Return the seconds at which the first run of an operation starts."""
        run = self.runs.index(op)
        return self.end_s[run - 1] if run else 0.0

    def move_release(self, offloaded: OffloadedValue, end_s: float, budget_bytes: int) -> None:
        """Move the run of `release` to where it starts at `end_s`, or as far as there is room for
        the tensor: not behind its `reload`, nor from the forward into the backward, which would
        save the tensor."""
        size_bytes = self.graph.values[offloaded.value].size_bytes
        run = new_run = self.runs.index(offloaded.release)
        last = self.runs.index(offloaded.reload) - 1
        if run < self.boundary_run:
            last = min(last, self.boundary_run - 1)
        while (
            new_run < last
            and self.end_s[new_run] < end_s
            and self.during_bytes[new_run + 1] + size_bytes <= budget_bytes
        ):
            new_run += 1
            self.during_bytes[new_run] += size_bytes
        self._move(run, new_run)

    def move_reload(self, offloaded: OffloadedValue, start_s: float, budget_bytes: int) -> None:
        """Move the run of `reload` to where it starts by `start_s`, or as far as there is room for
        the tensor: not before its `release`, nor into the forward."""
        size_bytes = self.graph.values[offloaded.buffer].size_bytes
        run = new_run = self.runs.index(offloaded.reload)
        first = max(self.boundary_run, self.runs.index(offloaded.release)) + 1
        while (
            new_run > first
            and self.end_s[new_run - 1] > start_s
            and self.during_bytes[new_run - 1] + size_bytes <= budget_bytes
        ):
            new_run -= 1
            self.during_bytes[new_run] += size_bytes
        self._move(run, new_run)

    def _move(self, run: int, new_run: int) -> None:
        """Move a run that takes no time, and needs what the run that it moved to needs."""
        if new_run == run:
            return
        during_bytes = self.during_bytes[new_run]
        for column in (self.during_bytes, self.end_s):
            del column[run]
        self.runs.insert(new_run, self.runs.pop(run))
        self.during_bytes.insert(new_run, during_bytes)
        self.end_s.insert(new_run, self.end_s[new_run - 1] if new_run else 0.0)
