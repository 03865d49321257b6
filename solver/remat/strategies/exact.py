"""The optimum over every schedule of the graph's order, for small graphs."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph import Graph
from remat.milp import slots
from remat.milp.pulp_solvers import require
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.strategies.base import Solution
from remat.strategies.search import Search


@dataclass(frozen=True)
class Exact:
    """Checkmate's space: any earlier operation may run again before any later one.

    Its bound holds for every schedule of the order (`bound_scope` is "order"). The number of
    binaries grows with the square of the number of operations: beyond 150 or so, use `Auto`.
    """

    gap: float = 0.0
    time_limit: float = 300.0
    threads: int = 2
    solver: str = "HiGHS"
    seed: int = 0

    @property
    def name(self) -> str:
        """As it appears in `Plan.stats`."""
        return "exact"

    def run(
        self,
        graph: Graph,
        budget_bytes: int | None,
        *,
        start: Schedule | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> Solution:
        """The cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and no schedule is known to begin from."""
        if start is None:
            require(self.solver)
        search = Search(
            graph,
            self,
            lambda graph, _, affordable_s: slots.complete(graph, affordable_s),
            start=start,
            progress=progress,
            cancel=cancel,
        )
        return search.least_peak() if budget_bytes is None else search.least_cost(budget_bytes)
