"""Retain nothing of the forward pass: the opposite of `KeepAll`."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    forward_count,
    select_cheapest,
)
from remat.strategies.option_types import Checked


@dataclass(frozen=True)
class RecomputeAll(Checked):
    """Before each operation of the backward pass, recompute everything that it reads from the
    inputs, and drop it afterwards: quadratic time.

    This is not the smallest peak, as a recomputation needs as much memory as the forward pass
    between two reads. Without a backward pass, each operation starts from the inputs.
    """

    name = "recompute_all"

    def run(self, task: Task) -> Solution:
        """Return the single schedule. Raises `InfeasibleBudget` if it does not fit."""
        return select_cheapest(task, [("all", _schedule(task.graph))], strategy=self.name)


def _schedule(graph: Graph) -> Schedule:
    builder = ScheduleBuilder(graph)
    count = forward_count(graph) or 0
    for op in range(count):
        builder.run(op)
    builder.drop(v for op in range(count) for v in graph.operations[op].outputs)
    for op in range(count, len(graph)):
        operation = graph.operations[op]
        recomputed = builder.missing_operations(operation.inputs)
        for parent in recomputed:
            builder.run(parent)
        builder.run(op)
        builder.drop(v for o in (*recomputed, op) for v in graph.operations[o].outputs)
    return builder.schedule()
