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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.errors import wrong_type
from remat.graph import Baseline, Graph
from remat.limits.budget import Budget
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
    runs = np.array(schedule.runs, dtype=np.int64)
    spans = _copy_spans(graph, runs)
    live = _live_bytes_between_runs(graph, spans, len(runs))
    during = _bytes_during_runs(graph, runs, live, spans).tolist()
    live_bytes = live.tolist()
    return Timeline(
        peak_bytes=max(during, default=graph.constant_bytes),
        time_s=_total_time_s(graph, runs),
        before_bytes=tuple(live_bytes[:-1]),
        during_bytes=tuple(during),
        after_bytes=tuple(live_bytes[1:]),
        copies=tuple(map(Copy, *(column.tolist() for column in spans))),
    )


def overwritten_copies(graph: Graph, schedule: Schedule, copies: Sequence[Copy]) -> frozenset[int]:
    """Return the indices of the copies that their last reader overwrites: its output takes the
    copy's memory. Only the first run of an operation overwrites."""
    overwrites = overwritten_in_run(graph, schedule)
    return frozenset(
        index
        for index, (value, _, end) in enumerate(copies)
        if end < len(schedule) and value in overwrites[end]
    )


def peak_and_time(graph: Graph, schedule: Schedule) -> tuple[int, float]:
    """Return (peak in bytes, time in seconds) as `simulate` does, without the rest and without the
    check."""
    runs = np.array(schedule.runs, dtype=np.int64)
    spans = _copy_spans(graph, runs)
    during = _bytes_during_runs(
        graph, runs, _live_bytes_between_runs(graph, spans, len(runs)), spans
    )
    peak_bytes = int(during.max()) if len(during) else graph.constant_bytes
    return peak_bytes, _total_time_s(graph, runs)


def baseline_of(graph: Graph) -> Baseline:
    """Return the peak and time that percentages are relative to: of the step without recomputation,
    before any of its operations were split."""
    if graph.unsplit is not None:
        return graph.unsplit
    return Baseline(*peak_and_time(graph, Schedule.keep_all(graph)))


def budget_in_bytes(graph: Graph, budget: Budget) -> int | None:
    """Return a budget for a graph in bytes; None for "min"."""
    return budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)


_Integers = NDArray[np.int64]

_CopySpans = tuple[_Integers, _Integers, _Integers]
"""Value, first run and last run of every copy, in the order of the first runs."""


def _copy_spans(graph: Graph, runs: _Integers) -> _CopySpans:
    """Return the value, the first run and the last run of every copy."""
    after_last_run = len(runs)
    values, starts = graph.output_lists.of_runs(runs)
    ends = starts.copy()
    by_value = np.argsort(values, kind="stable")
    sorted_values = values[by_value]
    is_first = np.diff(sorted_values, prepend=-1) > 0
    # A read is of the last copy that started before it. Of results, the first copy is read.
    copy_keys = sorted_values * (after_last_run + 1) + starts[by_value]
    read_values, reads = graph.input_lists.of_runs(runs)
    is_read = ~graph.is_result[read_values]
    read_values, reads = read_values[is_read], reads[is_read]
    read_keys = read_values * (after_last_run + 1) + reads
    ends[by_value[np.searchsorted(copy_keys, read_keys) - 1]] = reads  # the last read remains
    ends[by_value[is_first & graph.is_result[sorted_values]]] = after_last_run
    return values, starts, ends


def _live_bytes_between_runs(graph: Graph, spans: _CopySpans, run_count: int) -> _Integers:
    """Return the live bytes between runs: before the first, after the first, ..., after the
    last."""
    values, starts, ends = spans
    sizes_bytes = graph.size_array_bytes[values]
    change_bytes = np.zeros(run_count + 2, dtype=np.int64)
    np.add.at(change_bytes, starts + 1, sizes_bytes)
    np.subtract.at(change_bytes, ends + 1, sizes_bytes)
    change_bytes[0] = graph.constant_bytes
    return np.cumsum(change_bytes[: run_count + 1])


def _bytes_during_runs(
    graph: Graph, runs: _Integers, live_bytes: _Integers, spans: _CopySpans
) -> _Integers:
    """Return the live bytes during each run, without the inputs that it overwrites."""
    during_bytes = live_bytes[:-1] + graph.produced_array_bytes[runs]
    if not len(graph.overwrite_lists.values):
        return during_bytes
    first_runs = np.sort(np.unique(runs, return_index=True)[1])
    overwritten, overwriting = graph.overwrite_lists.of_runs(runs[first_runs])
    keys = overwritten * len(runs) + first_runs[overwriting]
    values, _, ends = spans
    is_overwritten = (ends < len(runs)) & np.isin(values * len(runs) + ends, keys)
    np.subtract.at(
        during_bytes, ends[is_overwritten], graph.size_array_bytes[values[is_overwritten]]
    )
    return during_bytes


def overwritten_in_run(graph: Graph, schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the inputs that each run may overwrite: none if it is a recomputation."""
    seen = [False] * len(graph)
    overwrites: list[tuple[int, ...]] = []
    for op in schedule.runs:
        overwrites.append(() if seen[op] else graph.operations[op].overwrites)
        seen[op] = True
    return overwrites


def _total_time_s(graph: Graph, runs: _Integers) -> float:
    return math.fsum(graph.costs_s[runs].tolist())
