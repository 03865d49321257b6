"""Options and sizes at the ends of what is allowed."""

from __future__ import annotations

import math

import networkx as nx
from tests.graphs import chain

import remat
from remat.graph import Graph, Operation, Value
from remat.plan import Status
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies import Auto, Exact, KeepAll, LpRounding, Revolve


def inference() -> Graph:
    """Without a backward, any order may be taken."""
    return Graph(
        (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0)),
        (Value("x", 4), Value("y", 4)),
        frozenset({1}),
    )


def test_no_limit_of_time() -> None:
    for graph in (inference(), chain(6)):
        assert remat.solve(graph, "100%", Auto(time_limit=math.inf)).overhead == 0


def test_min_of_a_size_that_no_float_has() -> None:
    size_bytes = 2**53 + 1
    graph = Graph((Operation("f", (), (0,), 1.0),), (Value("x", size_bytes),))
    assert remat.solve(graph, "min", KeepAll()).peak_bytes == size_bytes


def test_a_relaxation_of_less_room_bounds_nothing() -> None:
    plan = remat.solve(chain(6), "100%", LpRounding(allowances=(0.3,)))
    assert plan.overhead > 0
    assert plan.lower_bound is None or plan.lower_bound == 0
    assert plan.status is Status.FEASIBLE


def test_more_checkpoints_than_stages() -> None:
    many = remat.solve(chain(20), "100%", Revolve(1_000_000))
    assert many.schedule == remat.solve(chain(20), "100%", Revolve(20)).schedule


def adversary() -> Graph:
    """`a`, `g` and what is made of them are too large to be there together; `z` is dear to make."""
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


def test_what_of_the_order_means() -> None:
    """Checkmate's space: decision 39. Outside of it, made again in another order, it is cheaper."""
    graph = adversary()
    outside = Schedule.of([0, 1, 2, 3, 4, 5, 6, 2, 3, 0, 1, 4, 7])
    found = simulate(graph, outside)
    assert (found.peak_bytes, found.time_s) == (23, 112)
    plan = remat.solve(graph, 23, Exact())
    assert (plan.status, plan.bound_scope, plan.time_s) == (Status.OPTIMAL, "order", 209)
