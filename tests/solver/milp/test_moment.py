"""Bounds from relaxations at checkpoint cuts: never above the optimum, and equal to it in some
cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers import brute_force
from tests.helpers.graphs import chain, small_graphs
from tests.helpers.laws import LAWS, peak_of

from remat.graph import Graph, Operation, Value
from remat.heuristics import peak_bounds as bound
from remat.heuristics.eviction import evict
from remat.milp import checkpoint_cuts
from remat.milp.checkpoint_cuts import CheckpointCuts
from remat.milp.retention_advice import RetentionAdvisor, implied_schedule
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Exact

pytestmark = pytest.mark.usefixtures("short_eviction")

ROUNDING = 1e-6


def integral(graph: Graph, budget: int, operations: list[int]) -> CheckpointCuts | None:
    return checkpoint_cuts.relax_cuts(graph, budget, operations, gap=0.0, time_limit=60.0)


def advisor(graph: Graph, budget: int) -> RetentionAdvisor:
    return RetentionAdvisor(graph, budget, gap=0.0, clock=Clock.of(60.0), stop=lambda: False)


def budgets(graph: Graph) -> st.SearchStrategy[int]:
    """Return budgets from just below feasible to where no recomputation is needed."""
    low = brute_force.smallest_budget(graph)
    high = peak_of(graph)
    return st.integers(max(1, low - 1), max(1, high))


def read_after_a_peak(length: int = 3) -> Graph:
    """Return a graph of values of a byte and a second each, an operation that needs memory, and
    readers of all values after it."""
    operations = [Operation(f"make{i}", (), (i,), 1.0) for i in range(length)]
    operations.append(Operation("peak", (), (length,), 1.0, workspace_bytes=length))
    sizes = [1] * length + [0]
    for i in range(length):
        operations.append(Operation(f"read{i}", (i,), (length + 1 + i,), 1.0))
        sizes.append(0)
    return Graph(tuple(operations), tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)))


@settings(LAWS, max_examples=40)
@hypothesis.given(small_graphs(), st.data())
def test_checkpoint_cuts_bound_every_schedule(graph: Graph, data: st.DataObject) -> None:
    """Integer programs are tighter than their relaxations, and several cuts than one of them."""
    budget = data.draw(budgets(graph))
    optimum = brute_force.cheapest(graph, budget)
    cuts = data.draw(st.sets(st.sampled_from(range(len(graph))), min_size=1, max_size=3))
    several = tuple(sorted(cuts))
    bounds: dict[tuple[int, ...], float] = {}
    for operations in (*((op,) for op in range(len(graph))), several):
        relaxed = checkpoint_cuts.relax_cuts(graph, budget, operations)
        exact = integral(graph, budget, list(operations))
        if relaxed is None or exact is None:
            assert optimum is None
            continue
        assert relaxed.operations == exact.operations == operations
        assert relaxed.bound_s >= graph.total_cost_s
        assert exact.bound_s >= relaxed.bound_s * (1 - ROUNDING)
        bounds[operations] = exact.bound_s
        if optimum is not None:
            assert exact.bound_s <= optimum * (1 + ROUNDING)
    if several in bounds:
        for operation in several:
            assert bounds[several] >= bounds[operation,] * (1 - ROUNDING)


@settings(LAWS, max_examples=40)
@hypothesis.given(small_graphs(max_operations=9, max_values=12), st.data())
def test_the_implied_schedule_has_the_cost_of_the_program(
    graph: Graph, data: st.DataObject
) -> None:
    """Also where it recomputes operations that may run only once, whose outputs are retained for a
    while."""
    several = data.draw(st.sets(st.sampled_from(range(len(graph))), min_size=2, max_size=3))
    highest = peak_of(graph)
    lowest = min(bound.peak_lower_bound_bytes(graph), highest)
    budget = lowest + int(data.draw(st.floats(0, 0.6)) * (highest - lowest))
    cut = integral(graph, budget, sorted(several))
    if cut is None:
        return
    schedule = implied_schedule(graph, cut)
    schedule.check(graph)
    assert simulate(graph, schedule).time_s <= cut.bound_s * (1 + ROUNDING) + ROUNDING


def retained_for_a_while() -> Graph:
    """Return a graph in which `once` cannot be recomputed.

    Of what is computed from it, only `early` fits together with `first`, and only `late`, which
    is computed from `early`, together with `second`; then `once` is read.
    """
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


def test_retained_values_are_computed_while_their_inputs_are_live() -> None:
    graph, budget = retained_for_a_while(), 10
    cut = integral(graph, budget, [4, 6])
    assert cut is not None
    schedule = implied_schedule(graph, cut)
    schedule.check(graph)  # `once` runs once
    timeline = simulate(graph, schedule)
    assert schedule.runs == (0, 1, 2, 3, 4, 5, 2, 6, 3, 7)
    assert timeline.peak_bytes <= budget
    assert timeline.time_s == pytest.approx(cut.bound_s, rel=ROUNDING)


@settings(LAWS, max_examples=40)
@hypothesis.given(small_graphs(), st.data())
def test_advice_never_raises_the_bound_over_the_optimum(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(budgets(graph))
    optimum = brute_force.cheapest(graph, budget)
    if optimum is None:
        return
    cut = advisor(graph, budget)
    before = cut.bound_s
    assert graph.total_cost_s <= before <= optimum * (1 + ROUNDING)
    for advice in cut.advice():
        assert before <= cut.bound_s <= optimum * (1 + ROUNDING)
        before = cut.bound_s
        schedule = evict(graph, budget, advice=advice)
        if schedule is not None:
            assert simulate(graph, schedule).peak_bytes <= budget


@pytest.mark.parametrize("length", [1, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_the_bound_is_the_optimum_where_one_cut_decides(length: int) -> None:
    """Each byte missing at the peak costs the second that recomputes the value."""
    graph = read_after_a_peak(length)
    for missing in range(length + 1):
        budget = 2 * length - missing
        cut = checkpoint_cuts.relax_cuts(graph, budget, [length])
        assert cut is not None
        optimum = solve(graph, budget, Exact(threads=1)).time_s
        assert optimum == graph.total_cost_s + missing
        assert cut.bound_s == pytest.approx(optimum, rel=ROUNDING)
        retained = cut.retained[0]
        assert sum(retained.values()) == pytest.approx(length - missing)


@pytest.mark.parametrize("budget", [8, 7, 6])
def test_the_bound_is_the_optimum_on_a_chain_with_enough_memory(budget: int) -> None:
    """In equal blocks, a dropped value is recomputed from what the block before it retains."""
    graph = chain(8)
    during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
    optimum = solve(graph, budget, Exact(threads=1)).time_s
    best = max(
        cut.bound_s
        for operation in checkpoint_cuts.candidate_cuts(during_bytes, budget, 12)
        if (cut := integral(graph, budget, [operation])) is not None
    )
    assert best == pytest.approx(optimum, rel=ROUNDING)


def test_the_bound_is_lower_where_recomputations_need_memory() -> None:
    """At the smallest budget the recomputations themselves do not fit, which no cut takes into
    account."""
    graph = chain(12)
    plan = solve(graph, "min", Exact(threads=1))
    cuts = [integral(graph, plan.budget_bytes, [op]) for op in range(len(graph))]
    assert max(m.bound_s for m in cuts if m is not None) < 0.95 * plan.time_s


def test_the_linear_bound_is_lower_where_half_a_value_fits() -> None:
    """Two values of two bytes and room for three: half of one cannot be retained."""
    operations = (
        Operation("a", (), (0,), 2.0),
        Operation("b", (), (1,), 2.0),
        Operation("peak", (), (2,), 1.0, workspace_bytes=3),
        Operation("read", (0, 1), (3,), 1.0),
    )
    sizes = (2, 2, 0, 0)
    graph = Graph(operations, tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)))
    relaxed = checkpoint_cuts.relax_cuts(graph, 6, [2])
    exact = integral(graph, 6, [2])
    assert relaxed is not None
    assert exact is not None
    assert relaxed.bound_s == pytest.approx(graph.total_cost_s + 1.0, rel=ROUNDING)
    assert exact.bound_s == pytest.approx(graph.total_cost_s + 2.0, rel=ROUNDING)
    assert solve(graph, 6, Exact(threads=1)).time_s == graph.total_cost_s + 2.0


def test_a_cut_where_nothing_fits_is_infeasible() -> None:
    graph = read_after_a_peak(3)
    assert checkpoint_cuts.relax_cuts(graph, 2, [3]) is None
    assert integral(graph, 2, [3]) is None
    assert checkpoint_cuts.relax_cuts(graph, 3, [3]) is not None


def test_candidate_cuts_are_where_memory_exceeds_the_budget() -> None:
    assert checkpoint_cuts.candidate_cuts((1, 2, 3), 3, 12) == []
    assert checkpoint_cuts.candidate_cuts((1, 5, 2, 7, 1), 3, 12) == [3, 1, 2]
    assert checkpoint_cuts.candidate_cuts((1, 5, 2, 7, 1), 3, 1) == [3]


def test_implied_schedules_recompute_nothing_for_values_of_zero_bytes() -> None:
    """An operation that runs once writes a value of zero bytes, on which no program decides."""
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
            Operation(f"op{i}", inputs, outputs, cost_s, workspace, recomputable=recomputable)
            for i, (inputs, outputs, cost_s, workspace, recomputable) in enumerate(table)
        ),
        tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)),
        results=frozenset({15}),
    )
    advised = advisor(graph, 29)
    list(advised.advice_from_more_cuts(lambda: Schedule.keep_all(graph), 60.0, lambda: False))
    assert advised.implied_schedules
    for schedule in advised.implied_schedules:
        schedule.check(graph)


@pytest.mark.parametrize("gap", [None, 0.0, 0.01])
def test_integer_programs_run_without_presolve(
    gap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes several times as long. For linear programs it selects the better advice."""
    all_options: list[Mapping[str, str | bool] | None] = []

    class RecordingSolver(checkpoint_cuts.HighsSolver):
        def __init__(self, **options: Any) -> None:
            all_options.append(options["options"])
            super().__init__(**options)

    monkeypatch.setattr(checkpoint_cuts, "HighsSolver", RecordingSolver)
    assert checkpoint_cuts.relax_cuts(read_after_a_peak(), 5, [3], gap=gap) is not None
    assert all_options == [None if gap is None else {"presolve": "off"}]
