# pyright: reportPrivateUsage=false
"""Small values that are set aside and slots that are sifted out leave schedules that fit, and
the optimum."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import chain, runs, small_graphs
from tests.helpers.laws import LAWS

import remat
from remat.graph import Graph, Operation, Value
from remat.heuristics.local_search import smallest_peak_schedule
from remat.heuristics.polish import prune
from remat.milp import slots
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.strategies.base import Task
from remat.strategies.search.eviction import (
    evict_for_cost,
    relax_at_checkpoint_cuts,
    reserve_small_values,
)
from remat.strategies.search.slot_programs import recombine_relaxation, relaxation_support
from remat.strategies.search.state import SearchState


def with_statistics(length: int = 12) -> Graph:
    """Return a chain of layers of 1,000 bytes; each also writes one byte that its backward
    reads."""
    operations: list[Operation] = []
    values: list[Value] = []
    for i in range(length):
        first = len(values)
        read = (first - 2,) if i else ()
        operations.append(Operation(f"f{i}", read, (first, first + 1), 1.0))
        values += [Value(f"x{i}", 1_000), Value(f"statistic{i}", 1)]
    for i in reversed(range(length)):
        gradient = (len(values) - 1,) if i < length - 1 else ()
        inputs = (2 * i, 2 * i + 1, *gradient)
        operations.append(Operation(f"b{i}", inputs, (len(values),), 1.0, backward=True))
        values.append(Value(f"g{i}", 1_000))
    return Graph(tuple(operations), tuple(values), frozenset({len(values) - 1}))


@settings(LAWS, max_examples=40)
@hypothesis.given(small_graphs(), st.data())
def test_schedules_that_fit_without_small_values_fit_with_them(
    graph: Graph, data: st.DataObject
) -> None:
    total = sum(value.size_bytes for value in graph.values)
    most_bytes = data.draw(st.integers(0, total))
    light, reserve_bytes = reserve_small_values(graph, most_bytes)
    assert reserve_bytes <= most_bytes
    schedule = prune(light, data.draw(runs(graph)))
    without = simulate(light, schedule)
    assert simulate(graph, schedule).peak_bytes <= without.peak_bytes + reserve_bytes
    assert simulate(graph, schedule).time_s == without.time_s


def test_the_smallest_values_are_set_aside_but_no_results() -> None:
    graph = with_statistics(3)
    light, reserve_bytes = reserve_small_values(graph, 2)
    assert reserve_bytes == 2
    assert [v for v, value in enumerate(light.values) if value.size_bytes == 0] == [1, 3]
    result = replace(graph, results=frozenset({1, len(graph.values) - 1}))
    light, reserve_bytes = reserve_small_values(result, 1_001)
    assert (light.values[1].size_bytes, reserve_bytes) == (1, 2)


def test_pruning_recomputes_no_value_of_zero_bytes() -> None:
    operations = (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0))
    nothing = Graph(operations, (Value("a", 0), Value("b", 1)), frozenset({1}))
    assert prune(nothing, Schedule.of([0, 0, 1])).runs == (0, 1)


def search_state_of(
    graph: Graph, budget_bytes: int, start: Schedule, reserve: float = 0.0
) -> SearchState:
    """Return the state of a search that may use every slot."""
    auto = remat.Auto(gap=0.0, time_limit=30.0, threads=1)
    task = Task(graph, budget_bytes, start)
    return SearchState(
        task, auto, lambda graph, *_: slots.build_complete_slots(graph), small_values_share=reserve
    )


@pytest.mark.parametrize("budget", [5, 6, 8])
def test_sifting_finds_the_optimum_of_a_chain(budget: int) -> None:
    graph = chain(8)
    offered = slots.build_complete_slots(graph)
    used = relaxation_support(graph, offered, budget, time_limit=30.0)
    assert used is not None
    used, _ = used
    assert len(used) - len(graph) < offered.optional_count / 2
    expensive = smallest_peak_schedule(graph, target_bytes=budget).schedule
    best = remat.solve(graph, budget, remat.Exact())
    state = search_state_of(graph, budget, expensive)
    recombine_relaxation(state, Clock.of(30.0))
    peak_bytes, time_s = peak_and_time(graph, state.best)
    assert peak_bytes <= budget
    assert best.time_s <= time_s <= peak_and_time(graph, expensive)[1]
    assert time_s == pytest.approx(best.time_s)


def test_nothing_is_sifted_where_nothing_fits() -> None:
    graph = chain(4)
    assert relaxation_support(graph, slots.build_complete_slots(graph), 1, time_limit=30.0) is None


@pytest.mark.slow_cases("40%")
@pytest.mark.parametrize("budget", ["60%", "40%"])
def test_a_plan_that_retains_small_values_fits_and_is_near_the_optimum(budget: str) -> None:
    graph = with_statistics(9)
    near_best = remat.Auto(gap=0.1, time_limit=20.0, threads=1, complete_slots=0, near_slots=10_000)
    search = remat.solve(graph, budget, near_best)
    assert search.peak_bytes <= search.budget_bytes
    exact = remat.solve(graph, budget, remat.Exact(time_limit=30.0))
    assert exact.time_s <= search.time_s <= exact.time_s * 1.15


@pytest.mark.slow
def test_programs_decide_on_small_values_only_where_needed() -> None:
    graph = with_statistics()
    tightest = smallest_peak_schedule(graph, target_bytes=0)
    budget = tightest.peak_bytes + 12

    def reduced(reserve: float, budget: int) -> tuple[Graph, int, list[Schedule]]:
        state = search_state_of(graph, budget, tightest.schedule, reserve)
        relax_at_checkpoint_cuts(state, state.clock)
        evict_for_cost(state, state.clock.limited_to_share(0.2))
        fits = [peak_and_time(state.graph, schedule)[0] for schedule in state.schedules]
        assert max(fits) <= state.budget_bytes
        return state.graph, state.budget_bytes, state.schedules

    light, left_bytes, schedules = reduced(0.01, budget)
    assert left_bytes == budget - 12
    assert {value.size_bytes for value in light.values} == {0, 1_000}
    assert schedules
    assert all(peak_and_time(graph, schedule)[0] <= budget for schedule in schedules)
    assert reduced(0.0, budget)[:2] == (graph, budget)
    # At the smallest peak, what is set aside is missing.
    full_graph, left_bytes, schedules = reduced(
        0.01, peak_and_time(light, tightest.schedule)[0] + 11
    )
    assert (full_graph, left_bytes, bool(schedules)) == (
        graph,
        peak_and_time(light, tightest.schedule)[0] + 11,
        True,
    )


@pytest.mark.slow
def test_the_smallest_peak_may_be_as_much_larger_as_the_strategy_tolerates() -> None:
    graph = with_statistics()
    auto = remat.Auto(time_limit=10.0, threads=1, complete_slots=0, peak_gap=0.1)
    smallest_bytes = peak_and_time(graph, auto.run(Task(graph)).schedule)[0]
    plan = remat.solve(graph, "min", auto)
    assert plan.peak_bytes <= smallest_bytes * 1.1
    assert plan.budget_bytes in (smallest_bytes, int(smallest_bytes * 1.1))
    proved = remat.solve(graph, "min", remat.Exact(time_limit=30.0))
    assert proved.budget_bytes == proved.peak_bytes
