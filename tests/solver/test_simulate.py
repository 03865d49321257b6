"""The simulator, compared with counts by hand on small graphs and with an explicit memory."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import chain, small_graphs

from remat.errors import GraphError
from remat.graph import Graph, Operation, Value
from remat.schedule import Schedule
from remat.simulate import Copy, Timeline, overwritten_copies, peak_and_time, simulate


def test_the_peak_of_a_chain_is_the_one_counted_by_hand() -> None:
    timeline = simulate(chain(2, size=10), Schedule.keep_all(chain(2)))
    # f0 | f0 f1 | f0 f1 b1 | f0 b1 b0 -> sizes 10 each; b1 reads f1 only, so f1 dies with it.
    assert timeline.during_bytes == (10, 20, 30, 30)
    assert timeline.before_bytes == (0, 10, 20, 20)
    assert timeline.after_bytes == (10, 20, 20, 10)
    assert timeline.peak_bytes == 30
    assert timeline.peak_run == 2
    assert timeline.time_s == 4.0
    assert timeline.copies[-1] == Copy(3, 3, 4)
    assert [timeline.live(run) for run in range(4)] == [(0,), (0, 1), (0, 1, 2), (0, 2, 3)]
    with pytest.raises(FrozenInstanceError):
        timeline.peak_bytes = 0  # type: ignore[misc]


def test_recomputation_reads_the_latest_copy_and_frees_the_first() -> None:
    graph = chain(3, size=10)
    timeline = simulate(graph, Schedule((0, 1, 2, 3, 1, 4, 5)))
    copies = [copy for copy in timeline.copies if copy.value == 1]
    assert copies == [Copy(1, 1, 2), Copy(1, 4, 5)]
    assert timeline.time_s == 7.0


def test_an_output_without_reader_lives_for_its_run_only() -> None:
    graph = Graph((Operation("a", (), (0,), 1.0), Operation("b", (), (1,), 1.0)), _values(5, 7))
    assert simulate(graph, Schedule.keep_all(graph)).during_bytes == (5, 7)


def test_results_stay_live_and_their_later_copies_are_dropped() -> None:
    graph = Graph(
        (Operation("a", (), (0, 1), 1.0), Operation("b", (1,), (2,), 1.0)),
        _values(100, 10, 1),
        results=frozenset({0}),
        constant_bytes=1000,
    )
    timeline = simulate(graph, Schedule((0, 0, 1)))
    assert timeline.during_bytes == (1110, 1210, 1111)
    assert timeline.after_bytes == (1100, 1110, 1100)


def test_workspace_counts_only_while_running() -> None:
    graph = Graph(
        (Operation("a", (), (0,), 1.0, 50), Operation("b", (0,), (1,), 1.0)), _values(1, 1)
    )
    assert simulate(graph, Schedule.keep_all(graph)).during_bytes == (51, 2)


def test_a_wrong_schedule_is_refused() -> None:
    with pytest.raises(GraphError):
        simulate(chain(2), Schedule((0, 1)))


def test_an_empty_graph_has_its_constant_memory() -> None:
    graph = Graph((), (), constant_bytes=12)
    timeline = simulate(graph, Schedule(()))
    assert timeline.peak_bytes == 12
    assert timeline.peak_run == 0
    assert (timeline.before_bytes, timeline.after_bytes, timeline.copies) == ((), (), ())


@settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(small_graphs(), st.data())
def test_the_simulator_agrees_with_an_explicit_memory(graph: Graph, data: st.DataObject) -> None:
    runs: list[int] = []
    for op in range(len(graph)):
        recomputable = [o for o in range(op) if graph.may_recompute(o, op)]
        if recomputable:
            runs += data.draw(st.lists(st.sampled_from(recomputable), max_size=2))
        runs.append(op)
    timeline = simulate(graph, Schedule.of(runs))
    assert list(timeline.during_bytes) == _explicit(graph, runs)
    assert list(timeline.during_bytes) == _from_copies(graph, runs, timeline)
    assert peak_and_time(graph, Schedule.of(runs)) == (timeline.peak_bytes, timeline.time_s)


def _explicit(graph: Graph, runs: list[int]) -> list[int]:
    """Return the bytes during each run, from asking at every run which copies have readers left."""
    during: list[int] = []
    for now in range(len(runs)):
        live = graph.constant_bytes
        for value in range(len(graph.values)):
            all_makings = [r for r in range(len(runs)) if _makes(graph, runs[r], value)]
            makings = [r for r in all_makings if r < now]
            if not makings:
                continue
            if value in graph.results:
                live += graph.values[value].size_bytes
                continue
            for making in makings:
                later = [r for r in all_makings if r > making]
                end = later[0] if later else len(runs)
                readers = range(now, end)
                if any(value in graph.operations[runs[r]].inputs for r in readers):
                    live += graph.values[value].size_bytes
        operation = graph.operations[runs[now]]
        live += sum(graph.values[v].size_bytes for v in operation.outputs)
        is_first = runs.index(runs[now]) == now
        for value in operation.overwrites if is_first else ():  # unless a later run reads this copy
            later_runs = [r for r in range(now + 1, len(runs)) if _makes(graph, runs[r], value)]
            readers = range(now + 1, later_runs[0] if later_runs else len(runs))
            if all(value not in graph.operations[runs[r]].inputs for r in readers):
                live -= graph.values[value].size_bytes
        during.append(live + operation.workspace_bytes)
    return during


def _from_copies(graph: Graph, runs: list[int], timeline: Timeline) -> list[int]:
    """Return the bytes during each run, from the copies: without those that the run overwrites."""
    overwritten = overwritten_copies(graph, Schedule.of(runs), timeline.copies)
    during = [graph.constant_bytes + graph.operations[op].workspace_bytes for op in runs]
    for index, copy in enumerate(timeline.copies):
        for run in range(copy.start, min(copy.end + 1, len(runs))):
            if run < copy.end or index not in overwritten:
                during[run] += graph.values[copy.value].size_bytes
    return during


def _makes(graph: Graph, op: int, value: int) -> bool:
    return value in graph.operations[op].outputs


def test_the_simulator_takes_linear_time() -> None:
    graph = chain(5_000)
    runs = [*range(5_000), *range(1, 5_000), *range(5_000, 10_000)] + [1] * 85_000
    began = time.process_time()
    simulate(graph, Schedule.of(runs))
    assert time.process_time() - began < 5.0


def _values(*sizes: int) -> tuple[Value, ...]:
    return tuple(Value(f"v{i}", size) for i, size in enumerate(sizes))
