"""Start copies back to the device earlier in a solved schedule, where the budget has room.

Copies are placed before the step is solved, for the recomputations that are expected then. A
schedule that recomputes less before an operation than expected waits there for a copy that starts
too late. Its memory is known once it is solved: where there is room before `reload`, it runs
earlier. The schedule then differs from the graph's order in the runs of `reload` only.
"""

from __future__ import annotations

import math

from remat.costs.link import Link
from remat.errors import GraphError
from remat.graph import Graph
from remat.passes.offload.copies import OffloadedValue, copy_times, offloaded_values
from remat.schedule import Schedule
from remat.simulate import simulate


def with_earlier_reloads(
    graph: Graph, schedule: Schedule, budget_bytes: int, link: Link
) -> Schedule:
    """Return a schedule of a graph with copies that waits less for them, within the same budget and
    with no more bytes on the host; the same schedule if that is not possible."""
    offloaded = offloaded_values(graph)
    arrivals = {graph.operations[o.arrive].name for o in offloaded}
    times = copy_times(graph, schedule.runs, link)
    if all(w.end_s <= w.start_s for w in times.waits if w.operation in arrivals):
        return schedule
    moves = _Moves(graph, schedule, offloaded)
    run_of = {op: run for run, op in enumerate(schedule.runs)}
    next_start_s = math.inf
    for o in sorted(offloaded, key=lambda o: run_of[o.arrive], reverse=True):
        copy_s = graph.values[o.value].size_bytes / link.to_device_bytes_per_s
        next_start_s = min(next_start_s, moves.start_s(o.arrive)) - copy_s
        moves.move_reload(o, next_start_s, budget_bytes)
    earlier = Schedule.of(moves.runs)
    try:
        peak_bytes = simulate(graph, earlier).peak_bytes
    except GraphError:
        return schedule
    faster = copy_times(graph, earlier.runs, link)
    is_better = (
        peak_bytes <= budget_bytes
        and faster.step_s < times.step_s
        and faster.largest_host_bytes <= times.largest_host_bytes
    )
    return earlier if is_better else schedule


class _Moves:
    """A schedule while runs of `reload` are moved, with the memory during each run, and the seconds
    at which each ends if nothing waits."""

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
        self.first = 0 if boundary is None else self.runs.index(boundary) + 1

    def start_s(self, op: int) -> float:
        """Return the seconds at which the first run of an operation starts."""
        run = self.runs.index(op)
        return self.end_s[run - 1] if run else 0.0

    def move_reload(self, offloaded: OffloadedValue, start_s: float, budget_bytes: int) -> None:
        """Move the run of `reload` to where it starts by `start_s`, or as far as there is room for
        the tensor: not before its `release`, nor into the forward."""
        runs, size_bytes = self.runs, self.graph.values[offloaded.buffer].size_bytes
        run = new_run = runs.index(offloaded.reload)
        earliest = max(self.first, runs.index(offloaded.release) + 1)
        while (
            new_run > earliest
            and self.end_s[new_run - 1] > start_s
            and self.during_bytes[new_run - 1] + size_bytes <= budget_bytes
        ):
            new_run -= 1
            self.during_bytes[new_run] += size_bytes
        if new_run == run:
            return
        for column in (self.during_bytes, self.end_s):
            del column[run]
        runs.insert(new_run, runs.pop(run))
        self.during_bytes.insert(new_run, self.during_bytes[new_run])
        self.end_s.insert(new_run, self.end_s[new_run - 1] if new_run else 0.0)
