"""What to save for the backward pass, by a knapsack.

In the manner of torch.compile's `activation_memory_budget` (torch._functorch): of the forward
values, save those that are worth most recomputation time within a budget of bytes, and make the
others again from what is saved. That a value is made again along with others, or from others that
are not saved either, is not seen by the knapsack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import ScheduleBuilder, select_cheapest, required_forward_count
from remat.strategies.options import Checked, between


@dataclass(frozen=True)
class Knapsack(Checked):
    """A 0/1 knapsack over forward values; its budget is searched, so that the simulated peak fits.

    An item is the outputs of one operation: its worth is the operation's time, its weight their
    bytes, counted in `pieces` of the whole. `choices` budgets are tried. A value that is made again
    stays until its last reader.
    """

    pieces: Annotated[int, between(1, 100_000)] = 1_000
    choices: Annotated[int, between(1, 10_000)] = 50
    name = "knapsack"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting choice. Raises `RematError` without a backward pass, and
        `InfeasibleBudget` where no choice fits."""
        count = required_forward_count(task.graph, self.name)
        candidates = self._candidates(task.graph, count)
        return select_cheapest(task, candidates, strategy=self.name)

    def _candidates(self, graph: Graph, count: int) -> Iterator[tuple[str, Schedule]]:
        items = _items(graph, count)
        weights_bytes = [sum(graph.values[v].size_bytes for v in outs) for _, outs in items]
        total_bytes = sum(weights_bytes)
        # Rounded up, so that what is saved never weighs more than the knapsack's budget.
        unit = max(1, -(-total_bytes // self.pieces))
        weights = [-(-weight // unit) for weight in weights_bytes]
        capacity = sum(weights)
        is_taken = _fill([graph.operations[op].cost_s for op, _ in items], weights, capacity)
        for choice in range(self.choices + 1):
            left = capacity * (self.choices - choice) // self.choices
            saved: set[int] = set()
            for item in reversed(range(len(items))):
                if is_taken[item, left]:
                    saved.update(items[item][1])
                    left -= weights[item]
            share = 1 - choice / self.choices
            yield f"saves {share:.0%} of {total_bytes:,} bytes", _saving(graph, count, saved)


def _items(graph: Graph, count: int) -> list[tuple[int, list[int]]]:
    """Each forward operation that the backward pass could need again, and its outputs."""
    builder = ScheduleBuilder(graph)
    for op in range(count):
        builder.run(op)
    builder.drop(range(len(graph.values)))
    read = [v for op in range(count, len(graph)) for v in graph.operations[op].inputs]
    wanted = builder.missing_operations(v for v in read if graph.producer[v] < count)
    items: list[tuple[int, list[int]]] = []
    needed = {v for op in wanted for v in graph.operations[op].inputs} | set(read)
    for op in wanted:
        outputs = graph.operations[op].outputs
        items.append((op, [v for v in outputs if v in needed and builder.is_droppable[v]]))
    return items


def _fill(worths: list[float], weights: list[int], capacity: int) -> npt.NDArray[np.bool_]:
    """Whether the best knapsack of each capacity over the first items takes the last of them."""
    best = np.zeros(capacity + 1)
    is_taken = np.zeros((len(worths), capacity + 1), dtype=np.bool_)
    for item, (worth, weight) in enumerate(zip(worths, weights, strict=True)):
        taken = best[: capacity + 1 - weight] + worth
        is_taken[item, weight:] = taken >= best[weight:]
        best[weight:] = np.maximum(best[weight:], taken)
    return is_taken


def _saving(graph: Graph, count: int, saved: set[int]) -> Schedule:
    builder = ScheduleBuilder(graph)
    for op in range(count):
        builder.run(op)
    made = (v for op in range(count) for v in graph.operations[op].outputs)
    builder.drop(v for v in made if v not in saved)
    for op in range(count, len(graph)):
        builder.recompute(graph.operations[op].inputs, drops_others=False)
        builder.run(op)
    return builder.schedule()
