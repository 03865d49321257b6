"""`Graph`: construction, validation, networkx both ways; `Schedule.check`."""

from __future__ import annotations

import re
from collections.abc import Callable
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


def overwriting(**change: Any) -> Graph:
    """Return a graph whose last operation overwrites its input, with a change of that operation."""
    operations = [Operation(f"op{i}", (), (i,), 1.0) for i in range(3)]
    last = Operation("last", (0,), (3,), 1.0, recomputable=False, overwrites=(0,))
    values = tuple(Value(f"v{i}", 4) for i in range(4))
    return Graph((*operations, replace(last, **change)), values, frozenset({2}))


def from_node(**change: object) -> Graph:
    """Return the graph of one node of networkx, with a change of its attributes."""
    g = nx.DiGraph()
    g.add_node("a", **({"cost": 1.0, "size": 1} | change))
    return Graph.from_networkx(g)


VALUE = Value("v", 1)
CYCLE = nx.DiGraph([("a", "b"), ("b", "a")])
CHAIN = chain(2).to_networkx()
ONCE = Graph((Operation("a", (), (0,), 1.0, recomputable=False),), (VALUE,))
INVALID: dict[str, Callable[[], object]] = {
    "must be inputs": lambda: overwriting(overwrites=(1,)),
    "they must be inputs, each once": lambda: overwriting(overwrites=(0, 0)),
    "overwrites 8 bytes; its outputs have 4": lambda: overwriting(overwrites=(0, 1), inputs=(0, 1)),
    "overwrites a result": lambda: overwriting(overwrites=(2,), inputs=(2,)),
    "needs a number `cost`": lambda: from_node(cost=None),
    "costs nan s; costs are finite": lambda: from_node(cost=float("nan")),
    "costs -1.0 s; costs are finite": lambda: from_node(cost=-1.0),
    "needs an integer `size`": lambda: from_node(size=1.5),
    "sizes are zero or more": lambda: from_node(size=-3),
    "a workspace of -1 bytes": lambda: from_node(workspace=-1),
    "the graph has a cycle": lambda: Graph.from_networkx(CYCLE),
    "exactly once": lambda: Graph.from_networkx(CHAIN, order=["f0"]),
    "before any operation": lambda: Graph.from_networkx(CHAIN, order=["b0", "f0", "f1", "b1"]),
    "not in the graph": lambda: Graph.from_networkx(CHAIN, results=["zz"]),
    "a second time": lambda: Graph(
        (Operation("a", (), (0,), 1.0), Operation("b", (), (0,), 1.0)), (VALUE,)
    ),
    "no operation produces": lambda: Graph((Operation("a", (), (), 1.0),), (VALUE,)),
    "boundary operation must have": lambda: Graph(
        (Operation("a", (), (0,), 1.0),), (VALUE,), boundary=0
    ),
    "never runs": lambda: Schedule((0, 1, 2)).check(chain(2)),
    "before it was ever produced": lambda: Schedule((1, 0, 2, 3)).check(chain(2)),
    "names operation 9": lambda: Schedule((0, 1, 2, 3, 9)).check(chain(2)),
    "may run only once": lambda: Schedule((0, 0)).check(ONCE),
}
"""Functions that make something invalid, by a part of the error."""


@pytest.mark.parametrize("message", INVALID)
def test_invalid_graphs_and_schedules_are_refused(message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        INVALID[message]()
    assert len(overwriting()) == 4
    assert len(from_node()) == 1


@settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(small_graphs())
def test_keep_all_is_a_schedule(graph: Graph) -> None:
    schedule = Schedule.keep_all(graph)
    schedule.check(graph)
    assert schedule.recomputed(graph) == {}


def test_order_sensitive_operations_keep_their_order() -> None:
    operations = tuple(
        Operation(name, (), (v,), 1.0, order_sensitive=name != "plain")
        for v, name in enumerate(("dropout", "plain", "rand"))
    )
    graph = Graph(operations, tuple(Value(o.name, 1) for o in operations))
    Schedule((1, 0, 2, 0)).check(graph)  # a recomputation replays the state of its first run
    with pytest.raises(GraphError, match="dropout runs after rand"):
        Schedule((2, 1, 0)).check(graph)
