"""Keep nothing of the forward pass: the other end from `KeepAll`."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import ScheduleBuilder, select_cheapest, forward_count
from remat.strategies.options import Checked


@dataclass(frozen=True)
class RecomputeAll(Checked):
    """Before each operation of the backward pass, everything that it reads is made again from the
    inputs, and dropped after it: quadratic time.

    Not the smallest peak, as a recomputation is as wide as the forward pass between two reads.
    Without a backward pass, each operation begins anew.
    """

    name = "recompute_all"

    def run(self, task: Task) -> Solution:
        """The one schedule there is; `InfeasibleBudget` if that does not fit."""
        return select_cheapest(task, [("all", _schedule(task.graph))], strategy=self.name)


def _schedule(graph: Graph) -> Schedule:
    builder = ScheduleBuilder(graph)
    count = forward_count(graph) or 0
    for op in range(count):
        builder.run(op)
    builder.drop(v for op in range(count) for v in graph.operations[op].outputs)
    for op in range(count, len(graph)):
        operation = graph.operations[op]
        again = builder.missing_operations(operation.inputs)
        for parent in again:
            builder.run(parent)
        builder.run(op)
        builder.drop(v for o in (*again, op) for v in graph.operations[o].outputs)
    return builder.schedule()
