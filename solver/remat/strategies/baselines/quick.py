"""The baseline strategies that every search runs, so that it is never worse than any of them.

Each takes milliseconds to a few seconds, even at 10,000 operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from remat.errors import RematError
from remat.graph import Graph
from remat.progress import Cancel, is_cancelled
from remat.schedule import Schedule
from remat.strategies.base import Strategy, Task
from remat.strategies.baselines.chen import ArticulationPoints, ChenGreedy
from remat.strategies.baselines.saved_values import Knapsack
from remat.strategies.baselines.uniform import EveryK, PerBlock

QUICK_BASELINES: tuple[Strategy, ...] = (
    PerBlock(),
    EveryK(),
    ChenGreedy(),
    ArticulationPoints("greedy"),
    Knapsack(),
)
"""Baseline strategies that are fast on graphs of any size."""


def quick_baseline_schedules(
    graph: Graph, budget_bytes: int | None = None, cancel: Cancel | None = None
) -> Iterator[Schedule]:
    """Yield the quick baselines' schedules within the budget; without one, those with the smallest
    peak of each.

    A baseline that does not apply to this graph, or has no schedule that fits before `cancel` is
    set, yields nothing.
    """
    for strategy in QUICK_BASELINES:
        if is_cancelled(cancel):
            return
        with suppress(RematError):
            yield strategy.run(Task(graph, budget_bytes, cancel=cancel)).schedule
