"""Law 5: brute force agrees with the program on every graph of up to 7 operations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import brute_force
from tests.graphs import small_graphs

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Exact

laws = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@laws
@given(small_graphs(), st.data())
def test_cost_is_the_optimum(graph: Graph, data: st.DataObject) -> None:
    smallest = brute_force.smallest_budget(graph)
    baseline = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    assert smallest <= baseline
    budget = data.draw(st.integers(max(1, smallest), max(1, baseline)))
    best = brute_force.cheapest(graph, budget)
    assert best is not None
    plan = solve(graph, budget, Exact())
    assert plan.time_s == pytest.approx(best, abs=1e-6)
    assert plan.lower_bound is not None
    assert plan.lower_bound <= plan.overhead + 1e-9
    assert plan.gap == pytest.approx(0, abs=1e-6)


@laws
@given(small_graphs())
def test_smallest_budget_is_the_smallest(graph: Graph) -> None:
    smallest = brute_force.smallest_budget(graph)
    if smallest < 2:
        return
    plan = solve(graph, "min", Exact())
    assert plan.peak_bytes == smallest
    best = brute_force.cheapest(graph, smallest)
    assert plan.time_s == pytest.approx(best, abs=1e-6)
    with pytest.raises(InfeasibleBudget) as error:
        solve(graph, smallest - 1, Exact())
    assert error.value.min_feasible_bytes == smallest


@laws
@given(small_graphs(max_operations=6), st.data())
def test_free_order_is_a_superset(graph: Graph, data: st.DataObject) -> None:
    """Re-runs in any order, any number of times, are never worse, and never cheaper than no
    recomputation; how much they gain is not known in general."""
    smallest = brute_force.smallest_budget(graph)
    assert brute_force.smallest_budget(graph, free=True) <= smallest
    baseline = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget = data.draw(st.integers(smallest, baseline))
    ordered = brute_force.cheapest(graph, budget)
    free = brute_force.cheapest(graph, budget, free=True)
    assert free is not None
    assert ordered is not None
    assert graph.total_cost_s <= free <= ordered
