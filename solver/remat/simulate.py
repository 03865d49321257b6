"""The simulator: peak bytes, time and the lifetime of every copy of every value of a schedule.

Every plan is verified by it. It shares no code with the MILP and is independent of slots. The rules
are those of the runtime:

* a run reads the latest copy of each input;
* a copy is freed right after its last reader, or right after its own run if nothing reads it;
* the first copy of a result is retained to the end and is the one that readers read; a later copy,
  from recomputing its operation for another output, is freed right after that run;
* while an operation runs, live memory is constant memory + all live copies (its inputs included)
  + all its outputs + its workspace, less those inputs that it overwrites and that are freed with
  it; only the first run of an operation overwrites. The peak is the largest such sum.

Linear in the number of (run, operand) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from remat.errors import wrong_type
from remat.graph import Baseline, Graph
from remat.schedule import Schedule


class Copy(NamedTuple):
    """One copy of a value: produced in run `start`, last needed in run `end` (both included).

    A retained result has `end` equal to the number of runs: it outlives the last one.
    """

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory and time of one schedule, run by run; constant memory is included everywhere.

    `before_bytes[r]`, `during_bytes[r]` and `after_bytes[r]` are live just before, during and just
    after run `r`. `time_s` is the sum of the costs of all runs, in the graph's cost unit (seconds).
    """

    peak_bytes: int
    time_s: float
    before_bytes: tuple[int, ...]
    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def peak_run(self) -> int:
        """The first run at which the peak is reached."""
        return self.during_bytes.index(self.peak_bytes) if self.during_bytes else 0

    def live(self, run: int) -> tuple[int, ...]:
        """Return the values with a live copy while `run` runs, its inputs and outputs included."""
        return tuple(sorted({c.value for c in self.copies if c.start <= run <= c.end}))


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Return the timeline of `schedule` on `graph`.

    Raises `GraphError` if the schedule is not valid for this graph (see `Schedule.check`), and
    TypeError for other objects, such as a trace or a plan.
    """
    if not isinstance(graph, Graph):
        raise wrong_type("simulate", "a Graph", graph, "pass trace.graph() or plan.graph")
    if not isinstance(schedule, Schedule):
        raise wrong_type("simulate", "a Schedule", schedule, "pass plan.schedule")
    schedule.check(graph)
    spans = _copy_spans(graph, schedule)
    live = _live_bytes(graph, spans, len(schedule))
    during = _during_bytes(graph, schedule, live, spans)
    return Timeline(
        peak_bytes=max(during, default=graph.constant_bytes),
        time_s=_total_time_s(graph, schedule),
        before_bytes=tuple(live[:-1]),
        during_bytes=tuple(during),
        after_bytes=tuple(live[1:]),
        copies=tuple(map(Copy, *spans)),
    )


def overwritten_copies(graph: Graph, schedule: Schedule, copies: Sequence[Copy]) -> frozenset[int]:
    """Return the indices of the copies that their last reader overwrites: the first run of an
    operation that may, whose output takes the copy's memory."""
    overwrites = overwritten_in_run(graph, schedule)
    return frozenset(
        index
        for index, (value, start, end) in enumerate(copies)
        if start < end < len(schedule) and value in overwrites[end]
    )


def peak_and_time(graph: Graph, schedule: Schedule) -> tuple[int, float]:
    """Return (peak in bytes, time in seconds) as `simulate` does, without the rest and without the
    check."""
    spans = _copy_spans(graph, schedule)
    live = _live_bytes(graph, spans, len(schedule))
    during = _during_bytes(graph, schedule, live, spans)
    return max(during, default=graph.constant_bytes), _total_time_s(graph, schedule)


def baseline_of(graph: Graph) -> Baseline:
    """Return the peak and time that percentages are relative to: those of the step without
    recomputation, before any of its operations were split."""
    if graph.unsplit is not None:
        return graph.unsplit
    return Baseline(*peak_and_time(graph, Schedule.keep_all(graph)))


_CopySpans = tuple[list[int], list[int], list[int]]
"""Value, first run and last run of every copy."""


def _copy_spans(graph: Graph, schedule: Schedule) -> _CopySpans:
    after_last_run = len(schedule)
    operations = graph.operations
    results = graph.results
    values: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    latest = [-1] * len(graph.values)
    for run, op in enumerate(schedule.runs):
        operation = operations[op]
        for v in operation.inputs:
            if ends[latest[v]] < run:
                ends[latest[v]] = run
        for v in operation.outputs:
            end = run
            if v not in results:
                latest[v] = len(values)
            elif latest[v] < 0:
                latest[v] = len(values)
                end = after_last_run
            values.append(v)
            starts.append(run)
            ends.append(end)
    return values, starts, ends


def _live_bytes(graph: Graph, spans: _CopySpans, runs: int) -> list[int]:
    """Return the live bytes between runs: before the first, after the first, ..., after the
    last."""
    change = [0] * (runs + 2)
    for value, start, end in zip(*spans, strict=True):
        size = graph.values[value].size_bytes
        change[start + 1] += size
        change[end + 1] -= size
    change[0] = graph.constant_bytes
    return list(accumulate(change[: runs + 1]))


def _during_bytes(
    graph: Graph, schedule: Schedule, live: list[int], spans: _CopySpans
) -> list[int]:
    produced_bytes = [
        sum(graph.values[v].size_bytes for v in operation.outputs) + operation.workspace_bytes
        for operation in graph.operations
    ]
    during = [live[run] + produced_bytes[op] for run, op in enumerate(schedule.runs)]
    if any(operation.overwrites for operation in graph.operations):
        overwrites = overwritten_in_run(graph, schedule)
        for value, start, end in zip(*spans, strict=True):
            if start < end < len(during) and value in overwrites[end]:
                during[end] -= graph.values[value].size_bytes
    return during


def overwritten_in_run(graph: Graph, schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the inputs that each run may overwrite: none if it is a recomputation."""
    seen = [False] * len(graph)
    overwrites: list[tuple[int, ...]] = []
    for op in schedule.runs:
        overwrites.append(() if seen[op] else graph.operations[op].overwrites)
        seen[op] = True
    return overwrites


def _total_time_s(graph: Graph, schedule: Schedule) -> float:
    return math.fsum(graph.operations[op].cost_s for op in schedule.runs)
