"""`AtlasGraph`: the graph of a training step as a plain file, with the costs on several GPUs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from remat.documents.base import Cost, Document
from remat.documents.plan import GraphRecord
from remat.graph import Graph

GRAPHS = Path(__file__).parents[2] / "docs" / "atlas" / "graphs"
"""The folder of the published graphs."""


class AtlasGraph(Document):
    """The graph of a training step. `costs_s` has the seconds of each operation by GPU; those in
    `graph` are of the first GPU."""

    FORMAT: ClassVar[str] = "remat.atlas.graph"
    VERSION: ClassVar[int] = 1

    name: str = Field(max_length=100)
    title: str = Field(max_length=300)
    torch: str = Field(max_length=100)
    costs_s: dict[str, tuple[Cost, ...]] = Field(min_length=1)
    graph: GraphRecord

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self.graph.operations)
        for gpu, costs_s in self.costs_s.items():
            if len(costs_s) != count:
                raise ValueError(f"{gpu} has {len(costs_s)} costs for {count} operations")
        return self

    def on(self, gpu: str) -> Graph:
        """Return the validated graph with the costs of a GPU. Raises `GraphError`, and KeyError for
        a GPU without costs."""
        graph = self.graph.to_graph()
        pairs = zip(graph.operations, self.costs_s[gpu], strict=True)
        return replace(graph, operations=tuple(replace(o, cost_s=cost) for o, cost in pairs))

    @property
    def digest(self) -> str:
        """A digest of the content, by which results name their graph."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def path_of(name: str, folder: Path = GRAPHS) -> Path:
    """Return the path of a model's graph."""
    return folder / f"{name}.json.gz"
