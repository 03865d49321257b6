"""Laws of the schedules that need no solver, and of the bound that they are held against."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import brute_force
from tests.graphs import chain, small_graphs

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.heuristics.eviction import RULES, evict
from remat.heuristics.floor import least_peak_bytes
from remat.heuristics.local_search import fitting, smallest
from remat.heuristics.polish import polish
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve

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
