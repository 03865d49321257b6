"""Keep everything, recompute nothing: what PyTorch does without checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph import Graph
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies.base import Solution
from remat.strategies.infeasible import infeasible


@dataclass(frozen=True)
class KeepAll:
    """Every operation once. The fastest schedule there is, and the one with the largest peak."""

    name: str = "keep_all"

    def run(
        self,
        graph: Graph,
        budget_bytes: int | None,
        *,
        start: Schedule | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> Solution:
        """The graph's own order; `InfeasibleBudget` if that does not fit."""
        del start, progress, cancel
        schedule = Schedule.keep_all(graph)
        peak_bytes = simulate(graph, schedule).peak_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            raise infeasible(
                graph, budget_bytes, peak_bytes, "keep_all recomputes nothing", proved=False
            )
        bound = graph.total_cost_s if budget_bytes is not None else None
        return Solution(schedule, bound, "order", proved=budget_bytes is not None)
