"""The published benchmark graphs, read from a folder that the user names.

The files are data of others and no part of this repository. Memory is counted as in the published
figures: a node's inputs and output are there while it runs, an output without a user lives only
during its own step, and nothing else counts. Reading checks the peak without recomputation to the
unit, so that a figure is never compared on another graph.
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
    """A published file: its name, and what it holds."""

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
"""CM: training graphs of Checkmate (MLSys 2020), sizes in bytes. RL: random layered graphs of
Moccasin (ICML 2023), sizes in units."""


def load_published_graph(folder: Path, name: str) -> remat.Graph:
    """A published graph by its short name. Raises `ValueError` where the file is another one."""
    known = PUBLISHED_GRAPHS[name]
    document = json.loads((folder / known.file).read_text())
    graph = _checkmate(document) if name.startswith("CM") else _layered(document)
    peak = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    if (len(graph), peak) != (known.operations, known.baseline_peak_bytes):
        raise ValueError(
            f"{known.file} is not the published {name}: {len(graph)} operations with a peak of "
            f"{peak:,}, expected {known.operations} with {known.baseline_peak_bytes:,}"
        )
    return graph


def _checkmate(document: dict[str, Any]) -> remat.Graph:
    """`cost_cpu` and `cost_ram` on nodes; the order is networkx's topological sort."""
    g = nx.DiGraph()
    for node in document["nodes"]:
        g.add_node(
            node["id"], cost=node["cost_cpu"], size=node["cost_ram"], backward=node["backward"]
        )
    g.add_edges_from((link["source"], link["target"]) for link in document["links"])
    return remat.Graph.from_networkx(g)


def _layered(document: dict[str, Any]) -> remat.Graph:
    """`duration` and `out_cost` on nodes; the file names the order."""
    g = nx.DiGraph()
    for node in document["nodes"]:
        g.add_node(node["name"], cost=node["duration"], size=node["out_cost"])
    g.add_edges_from((link["0"], link["1"]) for link in document["links"])
    return remat.Graph.from_networkx(g, order=document["graph"]["order"])
