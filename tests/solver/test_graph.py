"""`Graph`: construction, validation, networkx both ways; `Schedule.check`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import networkx as nx
import pytest
from hypothesis import settings
from tests.helpers.graphs import chain, small_graphs

from remat.errors import GraphError
from remat.graph import Graph, Operation, Value
from remat.schedule import Schedule


def test_chain_has_the_expected_shape() -> None:
    graph = chain(3)
    assert [o.name for o in graph.operations] == ["f0", "f1", "f2", "b2", "b1", "b0"]
    assert graph.producer == (0, 1, 2, 3, 4, 5)
    assert graph.consumers[0] == (1, 5)
    assert graph.total_cost_s == 6.0
    assert graph.results == {5}


def test_networkx_round_trip_keeps_single_output_graphs() -> None:
    graph = chain(4, size=7, cost=0.5)
    order = [o.name for o in graph.operations]
    assert Graph.from_networkx(graph.to_networkx(), order=order) == graph
    once = [replace(o, recomputable=not o.backward) for o in graph.operations]
    once[4] = replace(once[4], overwrites=once[4].inputs[:1])
    graph = replace(graph, operations=tuple(once))
    assert Graph.from_networkx(graph.to_networkx(), order=order) == graph


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overwrites": (1,)}, "must be inputs"),
        ({"overwrites": (0, 0)}, "must be inputs"),
        ({"overwrites": (0, 1), "inputs": (0, 1)}, "overwrites 8 bytes; its outputs have 4"),
        ({"overwrites": (2,), "inputs": (2,)}, "overwrites a result"),
    ],
)
def test_invalid_overwrites_are_refused(change: dict[str, Any], message: str) -> None:
    operations = [Operation(f"op{i}", (), (i,), 1.0) for i in range(3)]
    last = Operation("last", (0,), (3,), 1.0, recomputable=False, overwrites=(0,))
    values = tuple(Value(f"v{i}", 4) for i in range(4))
    assert len(Graph((*operations, last), values, frozenset({2}))) == 4
    with pytest.raises(GraphError, match=message):
        Graph((*operations, replace(last, **change)), values, frozenset({2}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": None}, "needs a number `cost`"),
        ({"cost": float("nan")}, "costs are finite"),
        ({"cost": -1.0}, "costs are finite"),
        ({"size": 1.5}, "needs an integer `size`"),
        ({"size": -3}, "sizes are zero or more"),
        ({"workspace": -1}, "workspace"),
    ],
)
def test_wrong_attributes_are_named(change: dict[str, object], message: str) -> None:
    g = nx.DiGraph()
    g.add_node("a", **({"cost": 1.0, "size": 1} | change))
    with pytest.raises(GraphError, match=message):
        Graph.from_networkx(g)


def test_cycles_and_wrong_orders_are_refused() -> None:
    g = nx.DiGraph([("a", "b"), ("b", "a")])
    with pytest.raises(GraphError, match="cycle"):
        Graph.from_networkx(g)
    graph = chain(2).to_networkx()
    with pytest.raises(GraphError, match="exactly once"):
        Graph.from_networkx(graph, order=["f0"])
    with pytest.raises(GraphError, match="before any operation"):
        Graph.from_networkx(graph, order=["b0", "f0", "f1", "b1"])
    with pytest.raises(GraphError, match="not in the graph"):
        Graph.from_networkx(graph, results=["zz"])


def test_values_are_produced_exactly_once() -> None:
    value = Value("v", 1)
    with pytest.raises(GraphError, match="second time"):
        Graph((Operation("a", (), (0,), 1.0), Operation("b", (), (0,), 1.0)), (value,))
    with pytest.raises(GraphError, match="no operation produces"):
        Graph((Operation("a", (), (), 1.0),), (value,))


def test_the_boundary_runs_once() -> None:
    with pytest.raises(GraphError, match="boundary"):
        Graph((Operation("a", (), (0,), 1.0),), (Value("v", 1),), boundary=0)


@settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(small_graphs())
def test_keep_all_is_a_schedule(graph: Graph) -> None:
    schedule = Schedule.keep_all(graph)
    schedule.check(graph)
    assert schedule.recomputed(graph) == {}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((0, 1, 2), "never runs"),
        ((1, 0, 2, 3), "before it was ever produced"),
        ((0, 1, 2, 3, 9), "names operation 9"),
    ],
)
def test_schedules_are_checked(runs: tuple[int, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Schedule(runs).check(chain(2))


def test_an_operation_that_runs_once_is_not_recomputed() -> None:
    graph = Graph((Operation("a", (), (0,), 1.0, recomputable=False),), (Value("v", 1),))
    with pytest.raises(GraphError, match="only once"):
        Schedule((0, 0)).check(graph)


def test_order_sensitive_operations_keep_their_order() -> None:
    operations = tuple(
        Operation(name, (), (v,), 1.0, order_sensitive=name != "plain")
        for v, name in enumerate(("dropout", "plain", "rand"))
    )
    graph = Graph(operations, tuple(Value(o.name, 1) for o in operations))
    Schedule((1, 0, 2, 0)).check(graph)  # a recomputation replays the state of its first run
    with pytest.raises(GraphError, match="dropout runs after rand"):
        Schedule((2, 1, 0)).check(graph)
