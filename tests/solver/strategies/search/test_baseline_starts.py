"""`Auto` starts from the quick baselines: it is never worse than one of them, and ends in time."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import settings
from tests.helpers.graphs import small_graphs, uneven_layers
from tests.helpers.laws import LAWS, peak_of

from remat.errors import RematError
from remat.graph import Graph
from remat.heuristics.eviction import evict
from remat.heuristics.local_search import schedules_within_budget
from remat.simulate import peak_and_time
from remat.solve import solve
from remat.strategies import Auto, EveryK, Task
from remat.strategies.baselines.quick import QUICK_BASELINES, quick_baseline_schedules


@settings(LAWS, max_examples=25)
@hypothesis.given(small_graphs())
def test_auto_is_never_worse_than_a_quick_baseline(graph: Graph) -> None:
    for strategy in QUICK_BASELINES:
        try:
            smallest_bytes, time_s = peak_and_time(graph, strategy.run(Task(graph)).schedule)
        except RematError:
            continue
        if smallest_bytes == 0:  # no budget
            continue
        plan = solve(graph, smallest_bytes, Auto(order="off"))
        assert plan.time_s <= time_s * (1 + 1e-9)
        smallest = solve(graph, "min", Auto(order="off"))
        assert smallest.peak_bytes <= smallest_bytes * (1 + Auto().peak_gap)


@settings(LAWS, max_examples=25)
@hypothesis.given(small_graphs())
def test_quick_baseline_schedules_fit_their_budget(graph: Graph) -> None:
    peak_bytes = peak_of(graph)
    for share in (0.5, 0.8):
        budget_bytes = int(share * peak_bytes)
        for schedule in quick_baseline_schedules(graph, budget_bytes):
            schedule.check(graph)
            assert peak_and_time(graph, schedule)[0] <= budget_bytes


def test_an_attempt_that_becomes_too_expensive_is_abandoned() -> None:
    graph = uneven_layers(6)
    budget_bytes = int(0.7 * peak_of(graph))
    schedule = evict(graph, budget_bytes)
    assert schedule is not None
    time_s = peak_and_time(graph, schedule)[1]
    assert evict(graph, budget_bytes, max_time_s=time_s) == schedule
    assert evict(graph, budget_bytes, max_time_s=time_s * (1 - 1e-6)) is None
    assert evict(graph, budget_bytes, stop=lambda: True) is None
    assert schedules_within_budget(graph, budget_bytes, stop=lambda: True), (
        "the first attempts ignore the clock"
    )


class CountingCancel:
    """A cancellation that is set when it is asked for the third time: it is asked before a baseline
    runs, and after each choice of one."""

    calls = 0

    def is_set(self) -> bool:
        self.calls += 1
        return self.calls > 2


def test_quick_baselines_end_at_the_time_limit() -> None:
    graph, cancel = uneven_layers(6), CountingCancel()
    assert list(quick_baseline_schedules(graph, 1, cancel)) == []
    assert cancel.calls <= 4
    with pytest.raises(RematError, match="cancelled before it found"):
        EveryK().run(Task(graph, 1, cancel=cancel))
