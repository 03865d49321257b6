"""The default: complete slots where they are few, near slots elsewhere, wider as needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from remat.graph import Graph
from remat.milp import slots
from remat.milp.slots import Slots
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.strategies.base import Solution
from remat.strategies.search import Search

_REGION = 10_000
_BACKS = (14, 28, 56)
_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Auto:
    """Near-optimal plans for graphs of any size.

    `gap` is on total time: 0.005 ends the solve once the plan is proved to be within 0.5% of the
    best over the slots offered. At `time_limit` seconds the best plan so far is returned with the
    gap that is proved by then. `complete_slots` is up to how many optional slots every schedule
    of the order is considered, `near_slots` how many are offered at most otherwise.
    """

    gap: float = 0.005
    time_limit: float = 60.0
    threads: int = 2
    solver: str = "HiGHS"
    seed: int = 0
    complete_slots: int = 4_000
    near_slots: int = 2_500

    @property
    def name(self) -> str:
        """As it appears in `Plan.stats`."""
        return "auto"

    def run(
        self,
        graph: Graph,
        budget_bytes: int | None,
        *,
        start: Schedule | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> Solution:
        """The cheapest schedule within the budget, or the one with the smallest peak."""
        search = Search(graph, self, start=start, progress=progress, cancel=cancel)
        levels = self._levels(graph)
        if budget_bytes is None:
            return search.least_peak(levels)
        return search.least_cost(levels, budget_bytes)

    def _levels(self, graph: Graph) -> tuple[Callable[[Schedule | None], Slots], ...]:
        """Slot sets from narrow to wide; each is tried where the one before is infeasible."""
        if slots.complete_count(graph) <= self.complete_slots:
            return (lambda _: slots.complete(graph),)
        return tuple(partial(self._near, graph, back) for back in _BACKS)

    def _near(self, graph: Graph, back: int, keep: Schedule | None) -> Slots:
        for every in _EVERY:
            offered = slots.near(
                graph, back=back, every=every, idle=max(8, len(graph) // 40), region=_REGION, keep=keep
            )
            if offered.optional_count <= self.near_slots:
                break
        return offered
