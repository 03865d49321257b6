"""Laws of the schedules that need no solver, and of the bound that they are held against."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests import brute_force
from tests.graphs import chain, small_graphs, training_graphs
from tests.test_support import runs

from remat.errors import InfeasibleBudget
from remat.graph import Graph, Operation, Value
from remat.heuristics.eviction import RULES, evict
from remat.heuristics.floor import least_peak_bytes
from remat.heuristics.local_search import fitting, smallest
from remat.heuristics.polish import polish
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import RecomputeAll, Task

laws = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@laws
@given(small_graphs(), st.sampled_from(RULES), st.floats(0, 1))
def test_what_eviction_returns_fits(graph: Graph, rule: object, share: float) -> None:
    baseline = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget = int(baseline * share)
    schedule = evict(graph, budget, rule)
    if schedule is not None:
        assert simulate(graph, schedule).peak_bytes <= budget
        polished = simulate(graph, polish(graph, schedule, budget))
        assert polished.peak_bytes <= budget
        assert polished.time_s <= simulate(graph, schedule).time_s + 1e-9
    assert evict(graph, baseline, rule) == Schedule.keep_all(graph)


@laws
@given(small_graphs())
def test_no_schedule_is_under_the_bound(graph: Graph) -> None:
    bound = least_peak_bytes(graph)
    exact = brute_force.smallest_budget(graph)
    assert bound <= brute_force.smallest_budget(graph, free=True)
    assert bound <= exact <= smallest(graph, target_bytes=bound, effort=500).peak_bytes


@laws
@given(small_graphs(), st.data())
def test_what_is_polished_fits(graph: Graph, data: st.DataObject) -> None:
    """Whatever it was, in any budget that it fits, and takes no longer."""
    before = simulate(graph, schedule := data.draw(runs(graph)))
    budget = before.peak_bytes + data.draw(st.integers(0, 5))
    after = simulate(graph, polish(graph, schedule, budget))
    assert after.peak_bytes <= budget
    assert after.time_s <= before.time_s + 1e-9


@laws
@given(small_graphs(), st.floats(0, 1))
def test_what_is_polished_runs_nothing_again_for_nothing(graph: Graph, share: float) -> None:
    """Whichever recomputation is left out: it takes no time, or is needed, or does not fit."""
    budget = int(simulate(graph, Schedule.keep_all(graph)).peak_bytes * share)
    schedule = evict(graph, budget)
    if schedule is None:
        return
    kept = polish(graph, schedule, budget).runs
    for run, op in enumerate(kept):
        if op in kept[:run] and graph.operations[op].cost_s > 0:
            without = Schedule.of([*kept[:run], *kept[run + 1 :]])
            assert simulate(graph, without).peak_bytes > budget


def test_polish_keeps_a_copy_for_all_its_later_readers() -> None:
    """Of three runs of one operation, at any budget the fewest that its output leaves room for."""
    graph = chain(6)
    again = [*range(7), *range(6), 7, *range(5), 8, *range(4), 9, *range(3), 10, 0, 1, 11]
    schedule = Schedule.of(again)
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budgets = range(simulate(graph, schedule).peak_bytes, keep_all + 1)
    found = [polish(graph, schedule, budget) for budget in budgets]
    peaks = [simulate(graph, each).peak_bytes for each in found]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    counts = [len(each) for each in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == len(graph) < counts[1] < counts[0]


READ_AGAIN = Graph(
    operations=(
        *(
            Operation(f"f{i}", inputs=(i - 1,) if i else (), outputs=(i,), cost_s=1.0)
            for i in range(4)
        ),
        Operation("g3", inputs=(3,), outputs=(4,), cost_s=1.0, backward=True, recomputable=False),
        Operation("g2", inputs=(2, 4), outputs=(5,), cost_s=1.0, backward=True, recomputable=False),
        Operation(
            "g1", inputs=(1, 2, 5), outputs=(6,), cost_s=1.0, backward=True, recomputable=False
        ),
        Operation("g0", inputs=(0, 6), outputs=(7,), cost_s=1.0, backward=True, recomputable=False),
    ),
    values=tuple(Value(f"v{i}", size) for i, size in enumerate((2, 1, 1, 1, 2, 2, 1, 1))),
    results=frozenset({7}),
    boundary=4,
)
"""What g1 reads has to be made with nothing beside it."""


@laws
@given(training_graphs(max_operations=8))
@example(READ_AGAIN)
def test_eviction_reaches_what_recomputing_everything_does(graph: Graph) -> None:
    everything = simulate(graph, RecomputeAll().run(Task(graph)).schedule).peak_bytes
    found = smallest(graph, target_bytes=everything)
    assert found.peak_bytes <= everything


def test_the_same_search_finds_the_same() -> None:
    graph = chain(40, size=7)
    first = smallest(graph, target_bytes=least_peak_bytes(graph))
    assert first == smallest(graph, target_bytes=least_peak_bytes(graph))
    found = fitting(graph, first.peak_bytes * 2)
    assert found == fitting(graph, first.peak_bytes * 2)
    assert [rated.time_s for rated in found] == sorted(rated.time_s for rated in found)


def test_a_budget_below_the_bound_is_proved_infeasible() -> None:
    graph = chain(8, size=100)
    with pytest.raises(InfeasibleBudget, match="is proved infeasible") as error:
        solve(graph, least_peak_bytes(graph) - 1)
    smallest_bytes = error.value.min_feasible_bytes
    assert (smallest_bytes or 0) >= least_peak_bytes(graph)
