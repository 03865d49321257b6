"""The relaxation with values on the host: never above the optimum with two copy engines."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers import brute_force
from tests.helpers.graphs import chain, training_graphs
from tests.helpers.laws import LAWS, peak_of
from tests.helpers.offload_brute_force import cheapest_with_offload

from remat.costs.devices import Link
from remat.graph import Graph
from remat.milp import checkpoint_cuts
from remat.milp.checkpoint_cuts import HostLimits, OffloadCut, relax_offload_cut

ROUNDING = 1e-6
UNLIMITED = 1 << 40
LINKS = st.builds(Link, st.sampled_from((2.0, 20.0, 200.0)), st.sampled_from((2.0, 20.0, 200.0)))


def offloadable(graph: Graph) -> frozenset[int]:
    """Return the values that only the forward produces, and that are no results."""
    return frozenset(
        v
        for v in range(len(graph.values))
        if v not in graph.results and not graph.operations[graph.producer[v]].backward
    )


def check_bounds(graph: Graph, link: Link, share: float, host_bytes: int) -> bool:
    """Check the bounds at all operations, with the two largest values that can be offloaded; return
    True if offloading saves time."""
    by_size = sorted(offloadable(graph), key=lambda v: -graph.values[v].size_bytes)
    values = frozenset(by_size[:2])
    low, high = (
        graph.constant_bytes + max(_need_bytes(graph)),
        peak_of(graph),
    )
    budget = low + int(share * (high - low))
    optimum = cheapest_with_offload(graph, budget, link, values, host_bytes)
    without = brute_force.cheapest(graph, budget)
    if without is not None:
        assert optimum is not None
        assert optimum <= without * (1 + ROUNDING)
    limits = HostLimits(link, host_bytes, values)
    for operation in range(len(graph)):
        linear = relax_offload_cut(graph, budget, operation, limits)
        integral = relax_offload_cut(graph, budget, operation, limits, gap=1e-9)
        if linear is None or integral is None:
            assert optimum is None
            continue
        assert linear.bound_s <= integral.bound_s * (1 + ROUNDING)
        if optimum is not None:
            assert integral.bound_s <= optimum * (1 + ROUNDING)
    return optimum is not None and (without is None or optimum < without)


def _need_bytes(graph: Graph) -> list[int]:
    return [
        sum(graph.values[v].size_bytes for v in {*o.inputs, *o.outputs}) + o.workspace_bytes
        for o in graph.operations
    ]


def without_overwriting(graph: Graph) -> Graph:
    operations = tuple(replace(o, overwrites=()) for o in graph.operations)
    return replace(graph, operations=operations)


@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_no_step_with_copies_is_faster_than_the_bound(examples: int) -> None:
    saves: list[bool] = []

    @settings(LAWS, max_examples=examples)
    @hypothesis.given(
        training_graphs(renews=False).map(without_overwriting),
        LINKS,
        st.floats(0, 0.9),
        st.sampled_from((UNLIMITED, 40, 0)),
    )
    def law(graph: Graph, link: Link, share: float, host_bytes: int) -> None:
        saves.append(check_bounds(graph, link, share, host_bytes))

    law()
    assert sum(saves) >= len(saves) / 20


def cut(graph: Graph, budget: int, link: Link, host_bytes: int | None = None) -> OffloadCut:
    peak = graph.boundary or len(graph) // 2
    limits = HostLimits(link, host_bytes, offloadable(graph))
    solved = relax_offload_cut(graph, budget, peak, limits, gap=1e-6)
    assert solved is not None
    return solved


def test_without_a_host_the_bound_is_that_of_recomputation() -> None:
    graph = chain(8, size=10)
    for budget in (90, 70, 50):
        plain = checkpoint_cuts.relax_cuts(
            graph, budget, [len(graph) // 2], gap=1e-6, time_limit=60.0
        )
        assert plain is not None
        none = cut(graph, budget, Link(1.0, 1.0), host_bytes=0)
        assert none.bound_s == pytest.approx(plain.bound_s, rel=1e-4)
        assert not none.offloaded


def test_a_fast_link_needs_no_recomputation_and_a_slow_one_is_not_used() -> None:
    graph = chain(8, size=10)
    fast = cut(graph, 50, Link(1e6, 1e6))
    assert fast.bound_s == pytest.approx(graph.total_cost_s, rel=1e-5)
    assert fast.offloaded
    assert not fast.recomputed
    slow = cut(graph, 50, Link(1e-3, 1e-3))
    assert not slow.offloaded
    assert slow.recomputed
    assert slow.bound_s > graph.total_cost_s


def test_of_two_solutions_the_one_with_fewer_copies_is_taken() -> None:
    """Recomputing a value of no cost is as good as offloading it."""
    graph = chain(8, size=10, cost=0.0)
    graph = replace(
        graph, operations=tuple(replace(o, cost_s=float(o.backward)) for o in graph.operations)
    )
    limits = HostLimits(Link(1e6, 1e6), None, offloadable(graph))
    solved = relax_offload_cut(graph, 60, len(graph) // 2, limits, gap=1e-6, copy_cost=0.01)
    assert solved is not None
    assert solved.recomputed
    assert not solved.offloaded
