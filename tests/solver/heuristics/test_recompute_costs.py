"""Cached costs of recomputation are those of a fresh computation, and bounds are not above them."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.helpers.graphs import chain, small_graphs
from tests.helpers.laws import LAWS

from remat.graph import Graph
from remat.heuristics.recompute_costs import RecomputeCosts

NEXT_USE = float("inf")
MIN_COST_S = 1e-12


@pytest.mark.slow
@LAWS
@hypothesis.given(small_graphs(), st.data())
def test_costs_follow_what_is_in_memory(graph: Graph, data: st.DataObject) -> None:
    count = len(graph.values)
    resident = [False] * count
    costs = RecomputeCosts(graph, resident, MIN_COST_S, 2.0)
    stage = len(graph) - 1
    for _ in range(20):
        v = data.draw(st.integers(0, count - 1))
        resident[v] = not resident[v]
        if resident[v]:
            costs.note_allocation(v)
        else:
            costs.note_release(v)
        for u in data.draw(st.sets(st.integers(0, count - 1), max_size=4)):
            computed = RecomputeCosts(graph, list(resident), MIN_COST_S, 2.0)
            expected_s = computed.cost_s(u, stage, NEXT_USE)
            assert costs.bound_s(u, stage, NEXT_USE) <= expected_s
            if costs.holds_for_all_uses:
                divisor = costs.divisor(costs.bound_s(u, stage, NEXT_USE))
                assert costs.divisors[u] == divisor
            assert costs.cost_s(u, stage, NEXT_USE) == expected_s


def test_a_released_value_raises_the_cost_and_leaves_the_bound() -> None:
    graph = chain(3)
    resident = [True] * len(graph.values)
    costs = RecomputeCosts(graph, resident, MIN_COST_S, 2.0)
    last = graph.operations[2].outputs[0]
    cost_s = costs.cost_s(last, 2, NEXT_USE)
    between = graph.operations[1].outputs[0]
    resident[between] = False
    costs.note_release(between)
    assert 0.999 * cost_s <= costs.bound_s(last, 2, NEXT_USE) <= cost_s
    assert costs.cost_s(last, 2, NEXT_USE) == cost_s + graph.operations[1].cost_s
