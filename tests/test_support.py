# pyright: reportPrivateUsage=false
"""What is set aside and what is sifted out leaves schedules that fit, and the optimum in reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.graphs import chain, small_graphs

import remat
from remat.graph import Graph, Operation, Value
from remat.heuristics.local_search import smallest
from remat.heuristics.polish import prune
from remat.milp import slots
from remat.milp.small import set_aside
from remat.milp.support import support
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.strategies.base import Task
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known
from remat.strategies.search.steps.eviction import evict
from remat.strategies.search.steps.moments import relax
from remat.strategies.search.steps.slots import sift

LAWS = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def runs(graph: Graph) -> st.SearchStrategy[Schedule]:
    """Schedules that run any operations again, anywhere after their first run."""

    def build(extra: list[tuple[int, int]]) -> Schedule:
        again: list[list[int]] = [[] for _ in graph.operations]
        for stage, op in extra:
            if op < stage and graph.operations[op].recomputable:
                again[stage].append(op)
        return Schedule.of(
            run for stage in range(len(graph)) for run in (*sorted(set(again[stage])), stage)
        )

    last = len(graph) - 1
    pairs = st.tuples(st.integers(0, last), st.integers(0, last))
    return st.lists(pairs, max_size=8).map(build)


def with_statistics(length: int = 12) -> Graph:
    """A chain of layers of 1,000 bytes; each also gives a byte that its backward reads."""
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


@LAWS
@given(small_graphs(), st.data())
def test_what_fits_without_small_values_fits_with_them(graph: Graph, data: st.DataObject) -> None:
    total = sum(value.size_bytes for value in graph.values)
    most_bytes = data.draw(st.integers(0, total))
    light, reserve_bytes = set_aside(graph, most_bytes)
    assert reserve_bytes <= most_bytes
    schedule = prune(light, data.draw(runs(graph)))
    without = simulate(light, schedule)
    assert simulate(graph, schedule).peak_bytes <= without.peak_bytes + reserve_bytes
    assert simulate(graph, schedule).time_s == without.time_s


def test_the_smallest_are_set_aside_and_no_results() -> None:
    graph = with_statistics(3)
    light, reserve_bytes = set_aside(graph, 2)
    assert reserve_bytes == 2
    assert [v for v, value in enumerate(light.values) if value.size_bytes == 0] == [1, 3]
    result = replace(graph, results=frozenset({1, len(graph.values) - 1}))
    light, reserve_bytes = set_aside(result, 1_001)
    assert (light.values[1].size_bytes, reserve_bytes) == (1, 2)


def test_prune_makes_no_value_without_bytes_again() -> None:
    operations = (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0))
    nothing = Graph(operations, (Value("a", 0), Value("b", 1)), frozenset({1}))
    assert prune(nothing, Schedule.of([0, 0, 1])).runs == (0, 1)


def known_of(graph: Graph, budget_bytes: int, start: Schedule, reserve: float = 0.0) -> Known:
    """With every slot on offer."""
    auto = remat.Auto(gap=0.0, time_limit=30.0, threads=1)
    task = Task(graph, budget_bytes, start)
    return Known(task, auto, lambda graph, *_: slots.complete(graph), reserve=reserve)


@pytest.mark.parametrize("budget", [5, 6, 8])
def test_sifting_finds_the_optimum_of_a_chain(budget: int) -> None:
    graph = chain(8)
    offered = slots.complete(graph)
    used = support(graph, offered, budget, time_limit=30.0)
    assert used is not None
    used, _ = used
    assert len(used) - len(graph) < offered.optional_count / 2
    dear = smallest(graph, target_bytes=budget).schedule
    best = remat.solve(graph, budget, remat.Exact())
    known = known_of(graph, budget, dear)
    sift(known, Clock.of(30.0))
    peak_bytes, time_s = peak_and_time(graph, known.best)
    assert peak_bytes <= budget
    assert best.time_s <= time_s <= peak_and_time(graph, dear)[1]
    assert time_s == pytest.approx(best.time_s)


def test_nothing_is_sifted_where_nothing_fits() -> None:
    graph = chain(4)
    assert support(graph, slots.complete(graph), 1, time_limit=30.0) is None


@pytest.mark.parametrize("budget", ["60%", "40%"])
def test_a_plan_that_keeps_small_values_fits_and_is_near_the_best(budget: str) -> None:
    graph = with_statistics()
    kept = remat.Auto(gap=0.1, time_limit=20.0, threads=1, complete_slots=0, near_slots=10_000)
    search = remat.solve(graph, budget, kept)
    assert search.peak_bytes <= search.budget_bytes
    exact = remat.solve(graph, budget, remat.Exact(time_limit=30.0))
    assert exact.time_s <= search.time_s <= exact.time_s * 1.15


def test_programs_decide_on_small_values_only_where_they_must() -> None:
    graph = with_statistics()
    tightest = smallest(graph, target_bytes=0)
    budget = tightest.peak_bytes + 12

    def known(reserve: float, budget: int) -> tuple[Graph, int, list[Schedule]]:
        found = known_of(graph, budget, tightest.schedule, reserve)
        relax(found, found.clock)
        evict(found, found.clock.share(0.2))
        fits = [peak_and_time(found.graph, each)[0] for each in found.schedules]
        assert max(fits) <= found.budget_bytes
        return found.graph, found.budget_bytes, found.schedules

    light, left_bytes, found = known(0.01, budget)
    assert left_bytes == budget - 12
    assert {value.size_bytes for value in light.values} == {0, 1_000}
    assert found
    assert all(peak_and_time(graph, schedule)[0] <= budget for schedule in found)
    assert known(0.0, budget)[:2] == (graph, budget)
    # At the smallest peak, what is set aside is missing.
    whole, left_bytes, found = known(0.01, peak_and_time(light, tightest.schedule)[0] + 11)
    assert (whole, left_bytes, bool(found)) == (
        graph,
        peak_and_time(light, tightest.schedule)[0] + 11,
        True,
    )


def test_the_smallest_peak_may_be_as_much_larger_as_the_strategy_tolerates() -> None:
    graph = with_statistics()
    auto = remat.Auto(time_limit=10.0, threads=1, complete_slots=0, peak_gap=0.1)
    smallest_bytes = peak_and_time(graph, auto.run(Task(graph)).schedule)[0]
    plan = remat.solve(graph, "min", auto)
    assert plan.peak_bytes <= smallest_bytes * 1.1
    assert plan.budget_bytes in (smallest_bytes, int(smallest_bytes * 1.1))
    proved = remat.solve(graph, "min", remat.Exact(time_limit=30.0))
    assert proved.budget_bytes == proved.peak_bytes
