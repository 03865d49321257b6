"""Chen's checkpoints at articulation points only: Checkmate's variants for graphs with branches.

Jain et al.: Checkmate (MLSys 2020), section 6.1, "AP sqrt(n)" and "AP greedy": an articulation
point of the undirected forward graph is an operation whose removal disconnects it, so everything
after it can be recomputed from its output alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from remat.errors import RematError
from remat.graph import Graph
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.chen_greedy import greedy_candidates
from remat.strategies.baselines.chen_sqrt import checkpoint_after, sqrt_ends
from remat.strategies.baselines.schedule_builder import segmented_count, select_cheapest
from remat.strategies.option_types import Checked

if TYPE_CHECKING:
    import networkx as nx

_MIN_SEPARATED_SHARE = 0.5
"""Share of the forward time before an articulation point that removing it must disconnect."""


@dataclass(frozen=True)
class ArticulationPoints(Checked):
    """`ChenSqrt` or `ChenGreedy` with segments that end at articulation points.

    Points that only separate a side branch, such as the computation of a mask, do not count.
    """

    variant: Literal["sqrt", "greedy"] = "greedy"

    @property
    def name(self) -> str:
        """The strategy's name in `Plan.stats`."""
        return f"ap_{self.variant}"

    def run(self, task: Task) -> Solution:
        """Return the cheapest choice that fits. Raises `RematError` without articulation points,
        and `InfeasibleBudget` if no choice fits."""
        graph = task.graph
        points = articulation_points(graph)
        if not points:
            raise RematError(
                f"{self.name} needs articulation points, and the forward pass has none (its "
                "branches span all of it, as skip connections do): use ChenSqrt or ChenGreedy"
            )
        if self.variant == "greedy":
            candidates = greedy_candidates(graph, points, None)
        else:
            ends = sqrt_ends([*points, segmented_count(graph) - 1])
            candidates = iter([(f"{len(ends)} checkpoints", checkpoint_after(graph, ends))])
        return select_cheapest(task, candidates, strategy=self.name)


def articulation_points(graph: Graph) -> list[int]:
    """Return the operations that separate the forward graph into what comes before and after."""
    import networkx as nx

    count = segmented_count(graph)
    g: nx.Graph[int] = nx.Graph()
    g.add_nodes_from(range(count))
    for op in range(count):
        g.add_edges_from((graph.producer[v], op) for v in graph.operations[op].inputs)
    return [op for op in sorted(nx.articulation_points(g)) if _separates(graph, g, op, count)]


def _separates(graph: Graph, g: nx.Graph[int], point: int, count: int) -> bool:
    """True if removing `point` disconnects most of what comes before it from the last operation."""
    if point == count - 1:
        return False
    seen = {point, count - 1}
    stack = [count - 1]
    while stack:
        for op in g[stack.pop()]:
            if op not in seen:
                seen.add(op)
                stack.append(op)
    total_before_s = sum(graph.operations[op].cost_s for op in range(point))
    separated_s = sum(graph.operations[op].cost_s for op in range(point) if op not in seen)
    return point > 0 and separated_s >= _MIN_SEPARATED_SHARE * total_before_s and len(seen) < count
