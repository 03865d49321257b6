"""Law 5: the program finds the optimum of brute force on every graph of up to 7 operations."""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from tests.helpers import brute_force
from tests.helpers.case_counts import Tally
from tests.helpers.graphs import tight_cases

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.solve import solve
from remat.strategies import Exact

pytestmark = pytest.mark.usefixtures("short_eviction")

laws = settings(
    max_examples=min(30, int(os.environ.get("REMAT_EXAMPLES", "15"))),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_the_program_finds_the_cost_of_brute_force() -> None:
    tally = Tally()

    @laws
    @hypothesis.given(tight_cases())
    def law(case: tuple[Graph, int]) -> None:
        graph, budget = case
        best = brute_force.cheapest(graph, budget)
        if best is None:
            with pytest.raises(InfeasibleBudget) as error:
                solve(graph, budget, Exact())
            assert error.value.is_proved
            assert error.value.min_feasible_bytes == brute_force.smallest_budget(graph)
            return
        plan = solve(graph, budget, Exact())
        tally.add(plan)
        assert plan.time_s == pytest.approx(best, abs=1e-6)
        assert plan.lower_bound is not None
        assert plan.lower_bound <= plan.overhead + 1e-9
        assert plan.gap == pytest.approx(0, abs=1e-6)

    law()
    tally.check()


def test_the_program_finds_the_smallest_peak_of_brute_force() -> None:
    tally = Tally()

    @laws
    @hypothesis.given(tight_cases())
    def law(case: tuple[Graph, int]) -> None:
        graph, _ = case
        smallest = brute_force.smallest_budget(graph)
        plan = solve(graph, "min", Exact())
        tally.add(plan)
        assert plan.peak_bytes == smallest
        best = brute_force.cheapest(graph, smallest)
        assert plan.time_s == pytest.approx(best, abs=1e-6)
        if smallest > 1:
            with pytest.raises(InfeasibleBudget) as error:
                solve(graph, smallest - 1, Exact())
            assert error.value.min_feasible_bytes == smallest

    law()
    tally.check()


@pytest.mark.slow
@laws
@hypothesis.given(tight_cases(max_operations=6))
def test_recomputing_in_any_order_is_never_more_expensive(case: tuple[Graph, int]) -> None:
    """Recomputing in any order, any number of times, is never more expensive than in the graph's
    order, and no plan for any order of first runs is cheaper than that."""
    graph, budget = case
    ordered = brute_force.cheapest(graph, budget)
    free = brute_force.cheapest(graph, budget, free=True)
    assert brute_force.smallest_budget(graph, free=True) <= brute_force.smallest_budget(graph)
    if ordered is None:
        return
    assert free is not None
    assert graph.total_cost_s <= free <= ordered
    assert solve(graph, budget, Exact()).time_s >= free - 1e-6
