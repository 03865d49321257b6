"""Chen's checkpoints at articulation points only: Checkmate's variants for graphs with branches.

Jain et al.: Checkmate (MLSys 2020), section 6.1, "AP sqrt(n)" and "AP greedy": an articulation
point of the undirected forward graph is an operation without which it falls apart, so from its
output alone all that comes after can be made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from remat.errors import RematError
from remat.graph import Graph
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import select_cheapest, segmented_count
from remat.strategies.baselines.chen_greedy import greedy
from remat.strategies.baselines.chen_sqrt import cut_after, sqrt_ends
from remat.strategies.options import Checked

if TYPE_CHECKING:
    import networkx as nx

_BEHIND = 0.5
"""Of the forward time before an articulation point: so much falls off without it."""


@dataclass(frozen=True)
class ArticulationPoints(Checked):
    """`ChenSqrt` or `ChenGreedy` with segments that end in articulation points.

    Points that only hold a side branch, such as the making of a mask, do not count.
    """

    variant: Literal["sqrt", "greedy"] = "greedy"

    @property
    def name(self) -> str:
        """As it appears in `Plan.stats`."""
        return f"ap_{self.variant}"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting choice. Raises `RematError` without articulation points, and
        `InfeasibleBudget` where no choice fits."""
        graph = task.graph
        points = articulation_points(graph)
        if not points:
            raise RematError(
                f"{self.name} needs articulation points, and the forward pass has none (its "
                "branches span all of it, as skip connections do): use ChenSqrt or ChenGreedy"
            )
        if self.variant == "greedy":
            candidates = greedy(graph, points, None)
        else:
            ends = sqrt_ends([*points, segmented_count(graph) - 1])
            candidates = iter([(f"{len(ends)} checkpoints", cut_after(graph, ends))])
        return select_cheapest(task, candidates, strategy=self.name)


def articulation_points(graph: Graph) -> list[int]:
    """The operations without which the forward graph falls into what comes before and after."""
    import networkx as nx

    count = segmented_count(graph)
    g: nx.Graph[int] = nx.Graph()
    g.add_nodes_from(range(count))
    for op in range(count):
        g.add_edges_from((graph.producer[v], op) for v in graph.operations[op].inputs)
    return [op for op in sorted(nx.articulation_points(g)) if _separates(graph, g, op, count)]


def _separates(graph: Graph, g: nx.Graph[int], point: int, count: int) -> bool:
    if point == count - 1:
        return False
    seen = {point, count - 1}
    stack = [count - 1]
    while stack:
        for op in g[stack.pop()]:
            if op not in seen:
                seen.add(op)
                stack.append(op)
    before_s = sum(graph.operations[op].cost_s for op in range(point))
    off_s = sum(graph.operations[op].cost_s for op in range(point) if op not in seen)
    return point > 0 and off_s >= _BEHIND * before_s and len(seen) < count
