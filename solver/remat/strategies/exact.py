"""`Exact`: the optimum over every schedule of the graph's order, for small graphs."""

from __future__ import annotations

from dataclasses import dataclass

from remat.milp import slots
from remat.milp.solvers.pulp_solvers import require_solver
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.option_types import MilpOptions
from remat.strategies.search import pipeline
from remat.strategies.search.search import search
from remat.strategies.search.state import SearchState


@dataclass(frozen=True)
class Exact(MilpOptions):
    """Solves Checkmate's space: any earlier operation may be recomputed before any later one.

    Its bound holds for every schedule of the order (`bound_scope` is "order"). The number of
    binaries grows with the square of the number of operations: beyond 150 or so, use `Auto`.
    """

    name = "exact"

    def run(self, task: Task) -> Solution:
        """Return the cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and there is no schedule to start from."""
        if task.start is None:
            require_solver(self.solver)
        state = SearchState(
            task,
            self,
            lambda graph, _, affordable_s, __: slots.build_complete_slots(graph, affordable_s),
        )
        return search(state, pipeline.exact_pipeline())
