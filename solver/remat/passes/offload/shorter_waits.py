"""Wait less for copies in a solved schedule, where the budget has room.

Copies are placed before the step is solved, for the recomputations that are expected then. A
schedule that recomputes less waits for a copy back that starts too late, or for memory that it need
not free yet. Its memory is known once it is solved: where there is room, `release` runs later and
`reload` earlier. The schedule then differs from the graph's order in these runs only.
"""

from __future__ import annotations

import math
from itertools import accumulate

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
    offloaded = offloaded_values(graph)
    if _waits_for_copies(graph, schedule, link, {o.release for o in offloaded}):
        moves = _CopyMoves(graph, schedule, offloaded, budget_bytes)
        moves.release_later(link)
        schedule = _faster_schedule(graph, schedule, moves.runs, budget_bytes, link)
    if _waits_for_copies(graph, schedule, link, {o.arrive for o in offloaded}):
        moves = _CopyMoves(graph, schedule, offloaded, budget_bytes)
        moves.reload_earlier(link)
        schedule = _faster_schedule(graph, schedule, moves.runs, budget_bytes, link)
    return schedule


def _waits_for_copies(graph: Graph, schedule: Schedule, link: Link, operations: set[int]) -> bool:
    """True if one of these operations waits for a copy in this schedule."""
    names = {graph.operations[op].name for op in operations}
    waits = copy_times(graph, schedule.runs, link).waits
    return any(w.operation in names and w.end_s > w.start_s for w in waits)


def _faster_schedule(
    graph: Graph, schedule: Schedule, runs: list[int], budget_bytes: int, link: Link
) -> Schedule:
    """Return the schedule with these `runs` if it is valid, faster, within the budget or the
    present peak, and has no more bytes on the host; else `schedule`."""
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


class _CopyMoves:
    """A schedule while runs of `release` and `reload` are moved, with the memory during each run,
    and the seconds at which each ends if nothing waits."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        offloaded: tuple[OffloadedValue, ...],
        budget_bytes: int,
    ) -> None:
        self.graph, self.offloaded, self.budget_bytes = graph, offloaded, budget_bytes
        self.runs = list(schedule.runs)
        self.during_bytes = list(simulate(graph, schedule).during_bytes)
        copies = {op for o in offloaded for op in o.operations}
        costs = (0.0 if op in copies else graph.operations[op].cost_s for op in self.runs)
        self.end_s = list(accumulate(costs))
        boundary = graph.boundary
        self.boundary_run = -1 if boundary is None else self.runs.index(boundary)

    def release_later(self, link: Link) -> None:
        """Free tensors where their copies to the host have ended, or as late as there is room for
        them: not behind their `reload`, nor from the forward into the backward, which would save
        them."""
        end_s = 0.0
        for o in sorted(self.offloaded, key=lambda o: self.runs.index(o.offload)):
            size_bytes = self.graph.values[o.value].size_bytes
            end_s = (
                max(end_s, self._first_start_s(o.offload)) + size_bytes / link.to_host_bytes_per_s
            )
            run = new_run = self.runs.index(o.release)
            last = self.runs.index(o.reload) - 1
            if run < self.boundary_run:
                last = min(last, self.boundary_run - 1)
            while (
                new_run < last
                and self.end_s[new_run] < end_s
                and self._take_memory(new_run + 1, size_bytes)
            ):
                new_run += 1
            self._move_run(run, new_run)

    def reload_earlier(self, link: Link) -> None:
        """Start copies back where they end in time, or as early as there is room for them: not
        before their `release`, nor in the forward."""
        start_s = math.inf
        for o in sorted(self.offloaded, key=lambda o: self.runs.index(o.arrive), reverse=True):
            size_bytes = self.graph.values[o.value].size_bytes
            start_s = min(start_s, self._first_start_s(o.arrive))
            start_s -= size_bytes / link.to_device_bytes_per_s
            run = new_run = self.runs.index(o.reload)
            first = max(self.boundary_run, self.runs.index(o.release)) + 1
            while (
                new_run > first
                and self.end_s[new_run - 1] > start_s
                and self._take_memory(new_run - 1, size_bytes)
            ):
                new_run -= 1
            self._move_run(run, new_run)

    def _first_start_s(self, op: int) -> float:
        """Return the seconds at which the first run of an operation starts."""
        run = self.runs.index(op)
        return self.end_s[run - 1] if run else 0.0

    def _take_memory(self, run: int, size_bytes: int) -> bool:
        """Count memory as allocated during a run, if the budget has room for it; else return
        False."""
        if self.during_bytes[run] + size_bytes > self.budget_bytes:
            return False
        self.during_bytes[run] += size_bytes
        return True

    def _move_run(self, run: int, new_run: int) -> None:
        """Move a run that takes no time to the position of another one, with the memory of that."""
        if new_run == run:
            return
        during_bytes = self.during_bytes[new_run]
        for column in (self.during_bytes, self.end_s):
            del column[run]
        self.runs.insert(new_run, self.runs.pop(run))
        self.during_bytes.insert(new_run, during_bytes)
        self.end_s.insert(new_run, self.end_s[new_run - 1] if new_run else 0.0)
