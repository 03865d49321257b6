"""Options and sizes at the ends of what is allowed."""

from __future__ import annotations

import math

import networkx as nx
from tests.helpers.graphs import chain

import remat
from remat.graph import Graph, Operation, Value
from remat.plan import Status
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies import Auto, Exact, KeepAll, LpRounding, Revolve


def inference() -> Graph:
    """Return a graph without a backward, for which any order is allowed."""
    return Graph(
        (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0)),
        (Value("x", 4), Value("y", 4)),
        frozenset({1}),
    )


def test_an_infinite_time_limit_is_allowed() -> None:
    for graph in (inference(), chain(6)):
        assert remat.solve(graph, "100%", Auto(time_limit=math.inf)).overhead == 0


def test_sizes_that_no_float_represents_are_exact() -> None:
    size_bytes = 2**53 + 1
    graph = Graph((Operation("f", (), (0,), 1.0),), (Value("x", size_bytes),))
    assert remat.solve(graph, "min", KeepAll()).peak_bytes == size_bytes


def test_a_relaxation_with_less_memory_gives_no_bound() -> None:
    plan = remat.solve(chain(6), "100%", LpRounding(allowances=(0.3,)))
    assert plan.overhead > 0
    assert plan.lower_bound is None or plan.lower_bound == 0
    assert plan.status is Status.FEASIBLE


def test_more_checkpoints_than_stages_are_allowed() -> None:
    many = remat.solve(chain(20), "100%", Revolve(1_000_000))
    assert many.schedule == remat.solve(chain(20), "100%", Revolve(20)).schedule


def adversary() -> Graph:
    """Return a graph in which `a`, `g` and what is computed from them do not fit into memory
    together; `z` is expensive."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    sizes = {"a": 10, "u": 4, "g": 10, "h": 1, "w": 4, "z": 4, "M": 0, "T": 1}
    for name, size in sizes.items():
        cost, workspace = (100 if name == "z" else 1), (19 if name == "M" else 0)
        graph.add_node(
            name,
            size=size,
            cost=cost,
            workspace=workspace,
            result=name == "T",
            backward=name in "MT",
        )
    pairs = ("au", "gh", "aw", "hw", "uT", "wT", "zT")
    graph.add_edges_from((one, other) for one, other in pairs)
    return Graph.from_networkx(graph, order=list(sizes))


def test_the_bound_scope_order_excludes_other_orders() -> None:
    """The bound is for Checkmate's space (decision 8). A schedule outside of it, which recomputes
    in another order, is cheaper."""
    graph = adversary()
    outside_order = Schedule.of([0, 1, 2, 3, 4, 5, 6, 2, 3, 0, 1, 4, 7])
    timeline = simulate(graph, outside_order)
    assert (timeline.peak_bytes, timeline.time_s) == (23, 112)
    plan = remat.solve(graph, 23, Exact())
    assert (plan.status, plan.bound_scope, plan.time_s) == (Status.OPTIMAL, "order", 209)
