"""The baseline strategies that every search runs, so that it is never worse than any of them.

Each takes milliseconds to a few seconds, even at 10,000 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.errors import RematError
from remat.graph import Graph
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
    graph: Graph, budget_bytes: int | None, stop: Callable[[], bool]
) -> Iterator[Schedule]:
    """Yield the quick baselines' schedules within the budget; without one, those with the smallest
    peak of each.

    A baseline that does not apply to this graph, or has no schedule that fits before `stop` returns
    True, yields nothing.
    """
    for strategy in QUICK_BASELINES:
        if stop():
            return
        try:
            yield strategy.run(Task(graph, budget_bytes, cancel=_CallableCancel(stop))).schedule
        except RematError:
            continue


@dataclass(frozen=True)
class _CallableCancel:
    """A `Cancel` whose state is the result of a function."""

    is_set: Callable[[], bool]
