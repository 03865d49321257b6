"""Articulation points are the operations whose removal disconnects most of what comes before."""

from __future__ import annotations

import hypothesis
import networkx as nx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.helpers.graphs import small_graphs, training_graphs

from remat.graph import Graph
from remat.strategies.baselines.chen import articulation_points
from remat.strategies.baselines.schedule_builder import segmented_count


def separated_by_removal(graph: Graph) -> list[int]:
    """Return the points by removing each operation from the graph."""
    count = segmented_count(graph)
    g: nx.Graph[int] = nx.Graph()
    g.add_nodes_from(range(count))
    for op in range(count):
        g.add_edges_from((graph.producer[v], op) for v in graph.operations[op].inputs)
    points: list[int] = []
    for point in set(nx.articulation_points(g)).intersection(range(1, count - 1)):
        rest = g.copy()
        rest.remove_node(point)
        connected = nx.node_connected_component(rest, count - 1)
        cost_s = sum(graph.operations[op].cost_s for op in set(range(point)) - connected)
        before_s = sum(graph.operations[op].cost_s for op in range(point))
        if cost_s >= 0.5 * before_s:
            points.append(point)
    return sorted(points)


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@hypothesis.given(st.one_of(small_graphs(), training_graphs()))
def test_points_are_those_of_removing_each_operation(graph: Graph) -> None:
    assert articulation_points(graph) == separated_by_removal(graph)
