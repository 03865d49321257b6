"""Annealing over schedules and orders: results are valid, no worse than the start, and allowed
by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import hypothesis
import networkx as nx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import chain, random_forward_graph, small_graphs
from tests.helpers.laws import peak_of

from remat.errors import GraphError
from remat.graph import Graph, Operation, Value
from remat.heuristics.annealing.moves import (
    add_recomputation,
    evict_over_budget,
    exchange_recomputations,
    move_neighbouring_runs,
    relocate_run,
    remove_recomputation,
    shift_repeated_run,
    swap_recomputation,
    transpose_runs,
)
from remat.heuristics.annealing.orders import (
    first_run_order,
    reorder_graph,
    schedule_in_order,
    small_peak_order,
    with_fixed_order,
    with_order_constraints,
)
from remat.heuristics.annealing.schedule_profile import ScheduleProfile, next_reader_of_idle
from remat.heuristics.annealing.schedule_search import anneal_recomputations, anneal_schedule
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.strategies import Task
from remat.strategies.auto import Auto, Exact

MOVES = (
    relocate_run,
    transpose_runs,
    move_neighbouring_runs,
    add_recomputation,
    add_recomputation,
    remove_recomputation,
    exchange_recomputations,
    shift_repeated_run,
    evict_over_budget,
    swap_recomputation,
)


def topological_orders(graph: Graph) -> Iterator[list[int]]:
    """Return all topological orders of a graph."""
    g: nx.DiGraph[int] = nx.DiGraph()
    g.add_nodes_from(range(len(graph)))
    for op, operation in enumerate(graph.operations):
        g.add_edges_from((graph.producer[v], op) for v in operation.inputs)
    return nx.all_topological_sorts(g)


def is_allowed(graph: Graph, schedule: Schedule) -> bool:
    """True if the first runs stay on their side of the boundary and operations that run once
    stay in order."""
    order = first_run_order(schedule)
    operations = graph.operations
    fixed = [
        op for op in order if operations[op].order_sensitive or not operations[op].recomputable
    ]
    if fixed != sorted(fixed):
        return False
    if graph.boundary is None:
        return True
    cut = order.index(graph.boundary)
    return set(order[:cut]) == set(range(graph.boundary))


@pytest.mark.slow_cases("with_fixed_order")
@pytest.mark.parametrize("frame", [with_order_constraints, with_fixed_order])
@settings(max_examples=60, deadline=None)
@hypothesis.given(
    graph=small_graphs(max_operations=9, max_values=12, renews=False), seed=st.integers(0, 99)
)
def test_profile_agrees_with_the_simulator(
    frame: Callable[[Graph], Graph], graph: Graph, seed: int
) -> None:
    # Where order matters, nothing is overwritten: the profile counts both.
    operations = tuple(replace(o, overwrites=()) for o in graph.operations)
    graph = replace(graph, operations=operations)
    random = Random(seed)
    budget_bytes = int(0.7 * peak_of(graph))
    profile = ScheduleProfile(frame(graph), budget_bytes, range(len(graph)))
    for _ in range(60):
        runs = profile.runs
        if not random.choice(MOVES)(profile, random):
            profile.revert()
            continue
        profile.evaluate()
        if random.random() < 0.4:
            profile.revert()
            assert profile.runs == runs
        else:
            profile.commit()
        timeline = simulate(graph, Schedule.of(profile.runs))
        excess = sum(max(0, used - budget_bytes) for used in timeline.during_bytes)
        assert profile.excess_bytes == excess
        assert profile.time_s == pytest.approx(timeline.time_s)
        assert profile.peak_bytes() == timeline.peak_bytes
        assert is_allowed(graph, Schedule.of(profile.runs))
        assert frame is with_order_constraints or Schedule.of(profile.runs).keeps_order()


@settings(max_examples=60, deadline=None)
@hypothesis.given(small_graphs(max_operations=9, max_values=12, renews=False), st.integers(0, 99))
def test_idle_values_are_live_and_not_read(graph: Graph, seed: int) -> None:
    random = Random(seed)
    profile = ScheduleProfile(with_fixed_order(graph), 0, range(len(graph)))
    for _ in range(20):
        if random.choice((shift_repeated_run, add_recomputation, remove_recomputation))(
            profile, random
        ):
            profile.evaluate()
            profile.commit()
        else:
            profile.revert()
    runs = profile.runs
    timeline = simulate(graph, Schedule.of(runs))
    filled = [slot for slot, op in enumerate(profile.slots) if op >= 0]
    for v, value in enumerate(graph.values):
        if not value.size_bytes or v in graph.results:
            continue
        for run, slot in enumerate(filled):
            reader = next_reader_of_idle(profile, v, slot)
            operation = graph.operations[runs[run]]
            touched = v in operation.inputs or v in operation.outputs
            assert (reader >= 0) == (v in timeline.live(run) and not touched)
            assert reader < 0 or v in graph.operations[profile.slots[reader]].inputs


@pytest.mark.slow_cases("anneal_schedule")
@pytest.mark.parametrize("search", [anneal_schedule, anneal_recomputations])
@settings(max_examples=30, deadline=None)
@hypothesis.given(
    graph=small_graphs(renews=False), part=st.floats(0.3, 1.0), seed=st.integers(0, 9)
)
def test_search_is_valid_and_never_worse(
    search: Callable[..., Schedule], graph: Graph, part: float, seed: int
) -> None:
    start = Schedule.keep_all(graph)
    peak_bytes, time_s = peak_and_time(graph, start)
    budget_bytes = int(part * peak_bytes)
    result = search(graph, budget_bytes, start, max_moves=1500, seed=seed)
    assert is_allowed(graph, result)
    assert search is anneal_schedule or result.keeps_order()
    assert peak_and_time(graph, result)[0] <= peak_bytes
    if peak_bytes <= budget_bytes:
        assert peak_and_time(graph, result)[1] <= time_s
    assert result == search(graph, budget_bytes, start, max_moves=1500, seed=seed)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_search_in_a_fixed_order_finds_the_optimum(seed: int) -> None:
    graph = random_forward_graph(14, seed)
    floor_bytes = peak_lower_bound_bytes(graph)
    budget_bytes = (floor_bytes + 3 * peak_of(graph)) // 4
    best = Exact(gap=0.0).run(Task(graph, budget_bytes)).schedule
    result = anneal_recomputations(graph, budget_bytes, Schedule.keep_all(graph), max_moves=20_000)
    assert peak_and_time(graph, result)[0] <= budget_bytes
    assert peak_and_time(graph, result)[1] == pytest.approx(peak_and_time(graph, best)[1])


def test_search_in_a_fixed_order_refuses_a_start_in_another_order() -> None:
    graph = random_forward_graph(30, seed=1)
    order = small_peak_order(graph, target_bytes=0, max_moves=500)
    assert order != tuple(range(30))
    with pytest.raises(GraphError, match="before it was ever produced"):
        anneal_recomputations(graph, 0, Schedule.of(order))


@pytest.mark.slow
def test_auto_anneals_in_the_graph_order() -> None:
    graph = random_forward_graph(60, seed=1)
    budget_bytes = int(0.75 * peak_of(graph))
    solution = Auto(order="off", time_limit=3.0, gap=1e-6).run(Task(graph, budget_bytes))
    assert solution.schedule.keeps_order()
    assert peak_and_time(graph, solution.schedule)[0] <= budget_bytes
    assert solution.bound is not None
    assert solution.bound <= peak_and_time(graph, solution.schedule)[1]
    assert "annealing_s" in solution.stats


@pytest.mark.slow
def test_search_drops_recomputations_that_a_better_order_does_not_need() -> None:
    graph = random_forward_graph(30, seed=1)
    peak_bytes, _ = peak_and_time(graph, Schedule.of(small_peak_order(graph, target_bytes=0)))
    assert peak_bytes < peak_of(graph)
    result = anneal_schedule(graph, peak_bytes, Schedule.keep_all(graph), max_moves=60_000)
    assert peak_and_time(graph, result)[0] <= peak_bytes
    assert peak_and_time(graph, result)[1] == graph.total_cost_s


def test_search_improves_on_a_feasible_start() -> None:
    graph = chain(8)
    budget_bytes = 8
    recompute_all = [op for i in reversed(range(8)) for op in [*range(i + 1), 15 - i]]
    start = Schedule.of(list(range(8)) + recompute_all)
    peak_bytes, time_s = peak_and_time(graph, start)
    assert peak_bytes <= budget_bytes
    result = anneal_schedule(graph, budget_bytes, start, max_moves=20_000)
    assert peak_and_time(graph, result)[0] <= budget_bytes
    assert peak_and_time(graph, result)[1] < time_s


def test_search_stops_at_cancellation() -> None:
    graph = random_forward_graph(30, seed=1)
    start = Schedule.keep_all(graph)
    assert anneal_schedule(graph, 0, start, max_moves=10**9, stop=lambda: True) == start


@settings(max_examples=40, deadline=None)
@hypothesis.given(small_graphs(max_operations=6, renews=False))
def test_small_peak_order_is_never_below_the_optimum(graph: Graph) -> None:
    peaks = [
        peak_and_time(graph, Schedule.of(order))[0]
        for order in topological_orders(with_order_constraints(graph))
    ]
    order = small_peak_order(graph, target_bytes=0, max_moves=500)
    peak_bytes, _ = peak_and_time(graph, Schedule.of(order))
    assert is_allowed(graph, Schedule.of(order))
    assert min(peaks) <= peak_bytes <= peak_of(graph)


@pytest.mark.parametrize("seed", range(20))
def test_small_peak_order_finds_the_optimum(seed: int) -> None:
    graph = random_forward_graph(7, seed)
    peaks = [peak_and_time(graph, Schedule.of(order))[0] for order in topological_orders(graph)]
    order = small_peak_order(graph, target_bytes=0, max_moves=3000)
    assert peak_and_time(graph, Schedule.of(order))[0] == min(peaks)


@pytest.mark.slow
def test_small_peak_order_ends_at_its_target() -> None:
    graph = random_forward_graph(30, seed=1)
    start = Schedule.keep_all(graph)
    start_bytes = peak_and_time(graph, start)[0]
    best_bytes = peak_and_time(graph, Schedule.of(small_peak_order(graph, target_bytes=0)))[0]
    target_bytes = (start_bytes + best_bytes) // 2
    assert target_bytes < start_bytes, "the premise: another order needs less"
    # With so much effort it would not end otherwise.
    result = small_peak_order(graph, target_bytes=target_bytes, max_moves=10**9)
    assert peak_and_time(graph, Schedule.of(result))[0] <= target_bytes


@settings(max_examples=40, deadline=None)
@hypothesis.given(small_graphs(renews=False), st.integers(0, 99))
def test_reordering_a_graph_and_back_is_the_identity(graph: Graph, seed: int) -> None:
    order = small_peak_order(graph, target_bytes=0, max_moves=200, seed=seed)
    permuted, back = reorder_graph(graph, order)
    schedule = Schedule.keep_all(permuted)
    assert back(schedule).runs == tuple(order)
    assert schedule_in_order(back(schedule), order) == schedule
    assert peak_and_time(permuted, schedule) == peak_and_time(graph, back(schedule))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    assert reorder_graph(permuted, inverse)[0] == graph


def test_reordering_refuses_an_invalid_order() -> None:
    with pytest.raises(GraphError, match="before any operation"):
        reorder_graph(chain(2), (1, 0, 2, 3))


def test_guarded_keeps_indices_and_bytes() -> None:
    operations = [
        Operation("a", (), (0,), 1.0, recomputable=False),
        Operation("b", (), (1,), 1.0, recomputable=False),
        Operation("tangents", (), (2,), 0.0, recomputable=False),
        Operation("c", (0, 1, 2), (3,), 1.0, backward=True),
        Operation("d", (0,), (4,), 1.0, backward=True),
    ]
    values = tuple(Value(f"v{i}", 3) for i in range(5))
    graph = Graph(tuple(operations), values, boundary=2)
    frame = with_order_constraints(graph)
    allowed = Schedule.of((0, 1, 2, 4, 3))
    assert peak_and_time(frame, allowed) == peak_and_time(graph, allowed)
    for runs in ((1, 0, 2, 3, 4), (0, 2, 1, 4, 3), (0, 1, 4, 2, 3)):
        with pytest.raises(GraphError, match="before it was ever produced"):
            Schedule.of(runs).check(frame)
