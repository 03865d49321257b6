"""Which values to save for the backward pass, by a knapsack.

In the manner of torch.compile's `activation_memory_budget` (torch._functorch): of the forward
values, save those that are worth most recomputation time within a budget of bytes, and recompute
the others from the saved ones. The knapsack does not see that a value is recomputed along with
others, or from others that are not saved either.
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
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    required_forward_count,
    save_values,
    select_cheapest,
)
from remat.strategies.option_types import Checked, between


@dataclass(frozen=True)
class Knapsack(Checked):
    """Saves forward values selected by a 0/1 knapsack, whose capacity is searched so that the
    simulated peak fits.

    An item is the outputs of one operation: its value is the operation's time, its weight their
    bytes, counted in `pieces` of the total. `choices` capacities are tried. A recomputed value
    stays until its last reader.
    """

    pieces: Annotated[int, between(1, 100_000)] = 1_000
    choices: Annotated[int, between(1, 10_000)] = 50
    name = "knapsack"

    def run(self, task: Task) -> Solution:
        """Return the cheapest choice that fits. Raises `RematError` without a backward pass, and
        `InfeasibleBudget` if no choice fits."""
        count = required_forward_count(task.graph, self.name)
        candidates = self._candidates(task.graph, count)
        return select_cheapest(task, candidates, strategy=self.name)

    def _candidates(self, graph: Graph, count: int) -> Iterator[tuple[str, Schedule]]:
        items = _items(graph, count)
        weights_bytes = [sum(graph.values[v].size_bytes for v in outs) for _, outs in items]
        total_bytes = sum(weights_bytes)
        # Rounded up, so that the saved values never weigh more than the knapsack's capacity.
        unit = max(1, -(-total_bytes // self.pieces))
        weights = [-(-weight // unit) for weight in weights_bytes]
        capacity = sum(weights)
        is_taken = _fill([graph.operations[op].cost_s for op, _ in items], weights, capacity)
        for choice in range(self.choices + 1):
            remaining = capacity * (self.choices - choice) // self.choices
            saved: set[int] = set()
            for item in reversed(range(len(items))):
                if is_taken[item, remaining]:
                    saved.update(items[item][1])
                    remaining -= weights[item]
            share = 1 - choice / self.choices
            yield f"saves {share:.0%} of {total_bytes:,} bytes", save_values(graph, saved)


def _items(graph: Graph, count: int) -> list[tuple[int, list[int]]]:
    """Return each forward operation that the backward pass may have to recompute, with the outputs
    that may be saved."""
    builder = ScheduleBuilder(graph)
    for op in range(count):
        builder.run(op)
    builder.drop(range(len(graph.values)))
    read = [v for op in range(count, len(graph)) for v in graph.operations[op].inputs]
    recomputed = builder.missing_operations(v for v in read if graph.producer[v] < count)
    items: list[tuple[int, list[int]]] = []
    needed = {v for op in recomputed for v in graph.operations[op].inputs} | set(read)
    for op in recomputed:
        outputs = graph.operations[op].outputs
        items.append((op, [v for v in outputs if v in needed and builder.is_droppable[v]]))
    return items


def _fill(gains: list[float], weights: list[int], capacity: int) -> npt.NDArray[np.bool_]:
    """Return a mask [item, capacity]: true if the best knapsack of that capacity over the items up
    to this one takes it."""
    best = np.zeros(capacity + 1)
    is_taken = np.zeros((len(gains), capacity + 1), dtype=np.bool_)
    for item, (gain, weight) in enumerate(zip(gains, weights, strict=True)):
        gain_if_taken = best[: capacity + 1 - weight] + gain
        is_taken[item, weight:] = gain_if_taken >= best[weight:]
        best[weight:] = np.maximum(best[weight:], gain_if_taken)
    return is_taken
