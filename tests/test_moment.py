"""Bounds from relaxations at moments: never over the optimum, and where they are the optimum."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import brute_force
from tests.graphs import chain, small_graphs

from remat.graph import Graph, Operation, Value
from remat.heuristics import floor as bound
from remat.heuristics.eviction import evict
from remat.milp import moment
from remat.milp.advice import Advisor, implied_schedule
from remat.milp.moment import Moments
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Exact

LAWS = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ROUNDING = 1e-6


def integral(graph: Graph, budget: int, operations: list[int]) -> Moments | None:
    return moment.integral(graph, budget, operations, gap=0.0, time_limit=60.0)


def advisor(graph: Graph, budget: int) -> Advisor:
    deadline = time.monotonic() + 60
    return Advisor(graph, budget, gap=0.0, deadline=deadline, stop=lambda: False)


def budgets(graph: Graph) -> st.SearchStrategy[int]:
    """From just below what is feasible to what no recomputation needs."""
    low = brute_force.smallest_budget(graph)
    high = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    return st.integers(max(1, low - 1), max(1, high))


def read_after_a_peak(length: int = 3) -> Graph:
    """Values of a byte and a second each; an operation that needs room; and all are read."""
    operations = [Operation(f"make{i}", (), (i,), 1.0) for i in range(length)]
    operations.append(Operation("peak", (), (length,), 1.0, workspace_bytes=length))
    sizes = [1] * length + [0]
    for i in range(length):
        operations.append(Operation(f"read{i}", (i,), (length + 1 + i,), 1.0))
        sizes.append(0)
    return Graph(tuple(operations), tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)))


@LAWS
@given(small_graphs(), st.data())
def test_a_moment_bounds_every_schedule(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    optimum = brute_force.cheapest(graph, budget)
    for operation in range(len(graph)):
        relaxed = moment.linear(graph, budget, [operation])
        exact = integral(graph, budget, [operation])
        if relaxed is None or exact is None:
            assert optimum is None
            continue
        assert relaxed.operations == exact.operations == (operation,)
        assert relaxed.bound_s >= graph.total_cost_s
        assert exact.bound_s >= relaxed.bound_s * (1 - ROUNDING)
        if optimum is not None:
            assert exact.bound_s <= optimum * (1 + ROUNDING)


@LAWS
@given(small_graphs(), st.data())
def test_more_moments_bound_no_less(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    optimum = brute_force.cheapest(graph, budget)
    several = data.draw(st.sets(st.sampled_from(range(len(graph))), min_size=1, max_size=3))
    together = integral(graph, budget, sorted(several))
    relaxed = moment.linear(graph, budget, sorted(several))
    if together is None or relaxed is None:
        assert optimum is None
        return
    assert together.bound_s >= relaxed.bound_s * (1 - ROUNDING)
    for operation in several:
        alone = integral(graph, budget, [operation])
        assert alone is not None
        assert together.bound_s >= alone.bound_s * (1 - ROUNDING)
    if optimum is not None:
        assert together.bound_s <= optimum * (1 + ROUNDING)


@LAWS
@given(small_graphs(max_operations=9, max_values=12), st.data())
def test_the_implied_schedule_costs_what_the_program_says(
    graph: Graph, data: st.DataObject
) -> None:
    """Also where it is made from operations that may run only once, and held for a while."""
    several = data.draw(st.sets(st.sampled_from(range(len(graph))), min_size=2, max_size=3))
    highest = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    lowest = min(bound.least_peak_bytes(graph), highest)
    budget = lowest + int(data.draw(st.floats(0, 0.6)) * (highest - lowest))
    found = integral(graph, budget, sorted(several))
    if found is None:
        return
    schedule = implied_schedule(graph, found)
    schedule.check(graph)
    assert simulate(graph, schedule).time_s <= found.bound_s * (1 + ROUNDING) + ROUNDING


def held_for_a_while() -> Graph:
    """`once` cannot be made again. Of what is made from it, only `early` fits beside `first`, and
    only `late`, which is made from `early`, beside `second`; then the value after that is read."""
    operations = (
        Operation("once", (), (0,), 1.0, recomputable=False),
        Operation("early", (0,), (1,), 1.0),
        Operation("late", (1,), (2,), 1.0),
        Operation("large", (2,), (3,), 1.0),
        Operation("first", (), (4,), 1.0, workspace_bytes=8),
        Operation("read early", (1,), (5,), 1.0),
        Operation("second", (), (6,), 1.0, workspace_bytes=9),
        Operation("read large", (3,), (7,), 1.0),
    )
    sizes = (4, 2, 1, 4, 0, 0, 0, 0)
    return Graph(operations, tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)))


def test_what_is_held_is_made_while_it_can_be() -> None:
    graph, budget = held_for_a_while(), 10
    found = integral(graph, budget, [4, 6])
    assert found is not None
    schedule = implied_schedule(graph, found)
    schedule.check(graph)  # `once` runs once
    timeline = simulate(graph, schedule)
    assert schedule.runs == (0, 1, 2, 3, 4, 5, 2, 6, 3, 7)
    assert timeline.peak_bytes <= budget
    assert timeline.time_s == pytest.approx(found.bound_s, rel=ROUNDING)


@LAWS
@given(small_graphs(), st.data())
def test_advice_never_raises_the_bound_too_far(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    optimum = brute_force.cheapest(graph, budget)
    if optimum is None:
        return
    found = advisor(graph, budget)
    before = found.bound_s
    assert graph.total_cost_s <= before <= optimum * (1 + ROUNDING)
    for advice in found.advice():
        assert before <= found.bound_s <= optimum * (1 + ROUNDING)
        before = found.bound_s
        schedule = evict(graph, budget, advice=advice)
        if schedule is not None:
            assert simulate(graph, schedule).peak_bytes <= budget


@pytest.mark.parametrize("length", [1, 3, 6])
def test_the_bound_is_the_optimum_where_one_moment_is_what_matters(length: int) -> None:
    """Each byte missing at the peak costs the second that makes the value again."""
    graph = read_after_a_peak(length)
    for missing in range(length + 1):
        budget = 2 * length - missing
        found = moment.linear(graph, budget, [length])
        assert found is not None
        optimum = solve(graph, budget, Exact(threads=1)).time_s
        assert optimum == graph.total_cost_s + missing
        assert found.bound_s == pytest.approx(optimum, rel=ROUNDING)
        held = found.held[0]
        assert sum(held.values()) == pytest.approx(length - missing)


@pytest.mark.parametrize("budget", [8, 7, 6])
def test_the_bound_is_the_optimum_on_a_chain_with_room(budget: int) -> None:
    """Equal blocks: what is left out is made again from what the block before it keeps."""
    graph = chain(8)
    during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
    optimum = solve(graph, budget, Exact(threads=1)).time_s
    best = max(
        found.bound_s
        for operation in moment.candidates(during_bytes, budget, 12)
        if (found := integral(graph, budget, [operation])) is not None
    )
    assert best == pytest.approx(optimum, rel=ROUNDING)


def test_the_bound_is_less_where_recomputing_needs_room_too() -> None:
    """At the smallest budget the recomputations are what does not fit, which no moment sees."""
    graph = chain(12)
    plan = solve(graph, "min", Exact(threads=1))
    found = [integral(graph, plan.budget_bytes, [op]) for op in range(len(graph))]
    assert max(m.bound_s for m in found if m is not None) < 0.95 * plan.time_s


def test_the_linear_bound_is_less_where_halves_fit() -> None:
    """Two values of two bytes and room for three: half of one cannot be kept."""
    operations = (
        Operation("a", (), (0,), 2.0),
        Operation("b", (), (1,), 2.0),
        Operation("peak", (), (2,), 1.0, workspace_bytes=3),
        Operation("read", (0, 1), (3,), 1.0),
    )
    sizes = (2, 2, 0, 0)
    graph = Graph(operations, tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)))
    relaxed = moment.linear(graph, 6, [2])
    exact = integral(graph, 6, [2])
    assert relaxed is not None
    assert exact is not None
    assert relaxed.bound_s == pytest.approx(graph.total_cost_s + 1.0, rel=ROUNDING)
    assert exact.bound_s == pytest.approx(graph.total_cost_s + 2.0, rel=ROUNDING)
    assert solve(graph, 6, Exact(threads=1)).time_s == graph.total_cost_s + 2.0


def test_nothing_fits_at_a_moment() -> None:
    graph = read_after_a_peak(3)
    assert moment.linear(graph, 2, [3]) is None
    assert integral(graph, 2, [3]) is None
    assert moment.linear(graph, 3, [3]) is not None


def test_candidates_are_where_memory_is_over_the_budget() -> None:
    assert moment.candidates((1, 2, 3), 3, 12) == []
    assert moment.candidates((1, 5, 2, 7, 1), 3, 12) == [3, 1, 2]
    assert moment.candidates((1, 5, 2, 7, 1), 3, 1) == [3]


def test_implied_schedules_run_nothing_twice_for_values_without_bytes() -> None:
    """What may run once makes a value of no bytes, on which no program decides."""
    once, many = False, True
    table = [
        ((), (0, 1), 5.0, 3, many), ((), (2, 3), 4.0, 0, once), ((0,), (4, 5), 2.0, 1, once),
        ((3, 4), (6,), 3.0, 0, many), ((5,), (7,), 4.0, 0, many), ((0, 5, 6), (8,), 5.0, 1, many),
        ((0, 3, 6), (9, 10), 1.0, 0, many), ((5, 6, 7), (11,), 2.0, 0, once),
        ((4, 7, 8), (12, 13), 3.0, 0, many), ((1, 12, 13), (14,), 0.0, 3, once),
        ((3, 14), (15, 16), 1.0, 0, many), ((1, 6), (17,), 0.0, 0, many),
    ]  # fmt: skip
    sizes = (6, 6, 0, 6, 0, 2, 5, 4, 2, 4, 6, 5, 1, 3, 5, 6, 0, 5)
    graph = Graph(
        tuple(
            Operation(f"op{i}", inputs, outputs, cost_s, workspace, recomputable=again)
            for i, (inputs, outputs, cost_s, workspace, again) in enumerate(table)
        ),
        tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)),
        results=frozenset({15}),
    )
    advised = advisor(graph, 29)
    list(advised.pursue(lambda: Schedule.keep_all(graph), 60.0, lambda: False))
    assert advised.implied
    for schedule in advised.implied:
        schedule.check(graph)
