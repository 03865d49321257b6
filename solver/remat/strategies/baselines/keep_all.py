"""Retain everything, recompute nothing: what PyTorch does without checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.infeasible import infeasible
from remat.strategies.option_types import Checked


@dataclass(frozen=True)
class KeepAll(Checked):
    """Every operation once: the fastest schedule, and the one with the largest peak."""

    name = "keep_all"

    def run(self, task: Task) -> Solution:
        """Return the graph's own order. Raises `InfeasibleBudget` if it does not fit."""
        graph, budget_bytes = task.graph, task.budget_bytes
        schedule = Schedule.keep_all(graph)
        peak_bytes = simulate(graph, schedule).peak_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            raise infeasible(
                graph, budget_bytes, peak_bytes, "keep_all recomputes nothing", proved=False
            )
        bound = graph.total_cost_s if budget_bytes is not None else None
        return Solution(schedule, bound, "order", proved=budget_bytes is not None)
