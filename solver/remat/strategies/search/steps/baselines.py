"""What the quick baselines find, for a search to begin from: so it is never worse than any of them.

Each takes milliseconds to a few seconds, even at 10,000 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.strategies.base import Strategy, Task
from remat.strategies.baselines.articulation import ArticulationPoints
from remat.strategies.baselines.chen_greedy import ChenGreedy
from remat.strategies.baselines.every_k import EveryK
from remat.strategies.baselines.knapsack import Knapsack
from remat.strategies.baselines.per_block import PerBlock
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known

QUICK: tuple[Strategy, ...] = (
    PerBlock(),
    EveryK(),
    ChenGreedy(),
    ArticulationPoints("greedy"),
    Knapsack(),
)


def try_baselines(known: Known, clock: Clock) -> None:
    """What the quick baselines find within the budget, or with their smallest peaks."""
    known.offer(quick_schedules(known.task.graph, known.task.budget_bytes, clock.is_over))


def quick_schedules(
    graph: Graph, budget_bytes: int | None, stop: Callable[[], bool]
) -> Iterator[Schedule]:
    """Schedules within the budget; without one, those with each one's smallest peak.

    A baseline that does not work on this graph, or finds nothing that fits before `stop` says that
    it is too late, yields nothing.
    """
    for strategy in QUICK:
        if stop():
            return
        try:
            yield strategy.run(Task(graph, budget_bytes, cancel=_When(stop))).schedule
        except RematError:
            continue


@dataclass(frozen=True)
class _When:
    """A cancel that asks."""

    is_set: Callable[[], bool]
