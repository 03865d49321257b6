"""The bound of a plan holds for the scope that it names, also where a search considered only
some schedules."""

from __future__ import annotations

import threading

import highspy
import pytest
from tests.helpers.graphs import random_stages

import remat
from remat.graph import Graph, Operation, Value
from remat.plan import Plan, Status
from remat.solution import Solution
from remat.strategies import Auto, Exact, Strategy
from remat.strategies.base import Task

NEAR = Auto(order="off", threads=1, complete_slots=0)
"""A strategy that, on graphs of a dozen operations, has slots only for what its incumbents
recompute."""

Row = tuple[tuple[int, ...], float, int, int]
"""Inputs, seconds, workspace in bytes, bytes of the one output."""


def table(*rows: Row) -> Graph:
    return Graph(
        tuple(
            Operation(f"op{i}", inputs, (i,), cost_s, workspace)
            for i, (inputs, cost_s, workspace, _) in enumerate(rows)
        ),
        tuple(Value(f"v{i}", row[-1]) for i, row in enumerate(rows)),
    )


@pytest.fixture(scope="module")
def narrow() -> Graph:
    """Return a graph where eviction's schedule within 27 bytes is not optimal, and the slots
    have no better one."""
    return table(
        ((), 9.0, 0, 1), ((0,), 8.0, 2, 7), ((0, 1), 1.0, 4, 8), ((1, 2), 6.0, 0, 8),
        ((3,), 9.0, 4, 5), ((1, 3, 4), 3.0, 2, 5), ((4,), 4.0, 0, 7), ((3,), 3.0, 0, 6),
        ((0, 1, 3), 8.0, 0, 5), ((5, 8), 5.0, 4, 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def missed() -> Graph:
    """Return a graph where eviction and the slots find no schedule within 27 bytes, though there
    is one."""
    return table(
        ((), 8.0, 0, 7), ((0,), 4.0, 4, 9), ((0,), 8.0, 4, 7), ((0, 1), 6.0, 4, 1),
        ((1, 2), 8.0, 4, 2), ((0, 4), 5.0, 0, 6), ((1, 2), 4.0, 0, 1), ((4, 5), 5.0, 4, 8),
        ((1, 5), 3.0, 0, 3), ((0, 7), 6.0, 0, 8), ((2,), 9.0, 4, 8),
    )  # fmt: skip


def test_a_bound_over_slots_does_not_hold_for_the_order(narrow: Graph) -> None:
    exact = remat.solve(narrow, 27, Exact(threads=1))
    plan = remat.solve(narrow, 27, NEAR)
    assert plan.overhead > exact.overhead, "the premise: it is not the best"
    slots_bound = plan.stats["slots_bound"]
    assert isinstance(slots_bound, float)
    assert slots_bound > exact.overhead, "the premise: its slots have nothing better"
    assert plan.bound_scope == "order"
    assert plan.lower_bound is not None
    assert plan.lower_bound <= exact.overhead
    assert plan.gap == pytest.approx((plan.overhead - plan.lower_bound) / (1 + plan.overhead))
    assert plan.status is Status.FEASIBLE
    text = f"({slots_bound:+.3%} over the slots; gap 0.000%)"
    assert text in plan.describe()


def test_complete_slots_prove_the_bound_for_the_order(narrow: Graph) -> None:
    plan = remat.solve(narrow, 27, Exact(threads=1))
    assert plan.status is Status.OPTIMAL
    assert plan.bound_scope == "order"
    assert plan.lower_bound == pytest.approx(plan.overhead)
    assert "slots_bound" not in plan.stats
    assert "over the slots" not in plan.describe()


@pytest.mark.slow
def test_a_program_solved_to_the_end_proves_the_smallest_peak(
    missed: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Exact(threads=1).run(Task(missed)).proved
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    graph = random_stages(2, 14)
    solution = Exact(threads=1).run(Task(graph))
    assert not solution.proved
    assert solution.bound is not None
    assert solution.bound < remat.simulate(graph, solution.schedule).peak_bytes


@pytest.mark.parametrize("strategy", [Exact(threads=1), NEAR], ids=["exact", "near"])
def test_a_cancelled_solve_proves_nothing(narrow: Graph, strategy: Strategy) -> None:
    cancel = threading.Event()
    cancel.set()
    plan = remat.solve(narrow, 32, strategy, cancel=cancel)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.status is Status.FEASIBLE


def test_a_proof_over_slots_makes_no_plan_optimal(narrow: Graph) -> None:
    """Neither a strategy's own claim nor that of an older document counts."""
    schedule = remat.Schedule.keep_all(narrow)
    most = remat.simulate(narrow, schedule).peak_bytes
    solution = Solution(schedule, narrow.total_cost_s, "slots", True)
    plan = Plan.of(narrow, most, solution, {})
    assert plan.status is Status.FEASIBLE
    text = plan.to_json().replace('"FEASIBLE"', '"OPTIMAL"')
    assert '"OPTIMAL"' in text
    assert Plan.from_json(text) == plan
    wide = Plan.of(narrow, most, Solution(schedule, narrow.total_cost_s, "order", True), {})
    assert Plan.from_json(wide.to_json()).status is Status.OPTIMAL
