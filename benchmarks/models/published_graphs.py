"""Published benchmark graphs, read from a folder that the user names.

The files belong to others and are not part of this repository. Memory is counted as in the
published figures: a node's inputs and output are live while it runs, an output without a consumer
is live only while its node runs, and nothing else counts. Reading checks the exact peak without
recomputation, so that figures are never compared on different graphs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

import remat


@dataclass(frozen=True)
class PublishedGraph:
    """File name, number of operations, and peak without recomputation of a published graph."""

    file: str
    operations: int
    baseline_peak_bytes: int


PUBLISHED_GRAPHS = {
    "CM1": PublishedGraph("cm1_fcn8_vgg_b32.json", 73, 13_484_795_520),
    "CM2": PublishedGraph("cm2_resnet50_b256.json", 353, 38_059_356_160),
    "RL1": PublishedGraph("rl1_n100.json", 100, 46_319),
    "RL2": PublishedGraph("rl2_n250.json", 250, 146_840),
    "RL3": PublishedGraph("rl3_n500.json", 500, 284_439),
    "RL4": PublishedGraph("rl4_n1000.json", 1_000, 608_619),
}
"""The graphs by short name.

CM: training graphs of Checkmate (MLSys 2020), sizes in bytes. RL: random layered graphs of Moccasin
(ICML 2023), sizes without a unit.
"""


def load_published_graph(folder: Path, name: str) -> remat.Graph:
    """Return the published graph with a short name.

    Raises `ValueError` if the file has other operations or another peak than the published one.
    """
    published = PUBLISHED_GRAPHS[name]
    document = json.loads((folder / published.file).read_text())
    graph = _checkmate(document) if name.startswith("CM") else _layered(document)
    peak = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    if (len(graph), peak) != (published.operations, published.baseline_peak_bytes):
        raise ValueError(
            f"{published.file} is not the published {name}: {len(graph)} operations with a peak of "
            f"{peak:,}, expected {published.operations} with {published.baseline_peak_bytes:,}"
        )
    return graph


def _checkmate(document: dict[str, Any]) -> remat.Graph:
    """Return the graph of a Checkmate file.

    Nodes have `cost_cpu` and `cost_ram`; the order is networkx's topological sort.
    """
    g = nx.DiGraph()
    for node in document["nodes"]:
        g.add_node(
            node["id"], cost=node["cost_cpu"], size=node["cost_ram"], backward=node["backward"]
        )
    g.add_edges_from((link["source"], link["target"]) for link in document["links"])
    return remat.Graph.from_networkx(g)


def _layered(document: dict[str, Any]) -> remat.Graph:
    """Return the graph of a Moccasin file.

    Nodes have `duration` and `out_cost`; the file contains the order.
    """
    g = nx.DiGraph()
    for node in document["nodes"]:
        g.add_node(node["name"], cost=node["duration"], size=node["out_cost"])
    g.add_edges_from((link["0"], link["1"]) for link in document["links"])
    return remat.Graph.from_networkx(g, order=document["graph"]["order"])
