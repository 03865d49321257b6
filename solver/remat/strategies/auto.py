"""The default: complete slots where they are few, near slots elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from remat.graph import Graph
from remat.milp import slots
from remat.milp.pulp_solvers import require
from remat.milp.slots import Slots
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.strategies import ordered
from remat.strategies.base import Solution
from remat.strategies.near_search import NearSearch

_REGION = 100
"""Slots of an operation further apart than this many operations are no group. One group for all
allows one recomputation, and its cuts ask for inputs that were held since its first slot."""

_BACK = 14
_RESERVE = 0.1
"""Of the room, times the gap: what values may take together that no program decides on."""

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Auto:
    """Near-optimal plans for graphs of any size.

    `gap` is on total time: 0.005 ends the solve once the plan is proved to be within 0.5% of the
    best, of every schedule of the order or of those over the slots offered. At `time_limit` seconds
    the best plan so far is returned with the gap that is proved by then. A solver run ends sooner
    once its best plan and its bound have barely moved for `stall` seconds (or for as long as its
    first bound took); `math.inf` turns that off. For budget="min", a peak within `peak_gap` of a
    proved bound is small enough, and so is one within `peak_gap` of the smallest found.
    `complete_slots` is up to how many optional slots every schedule of the order is considered,
    `near_slots` how many are offered at most otherwise. `order` says whether other orders of the
    operations are searched too; "auto" does so for graphs that are no training step.
    """

    gap: float = 0.005
    time_limit: float = 60.0
    threads: int = 2
    solver: str = "HiGHS"
    seed: int = 0
    stall: float = 10.0
    peak_gap: float = 0.01
    complete_slots: int = 4_000
    near_slots: int = 2_000
    order: Literal["auto", "on", "off"] = "auto"

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
        """The cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and no schedule is known to begin from."""
        if start is None:
            require(self.solver)

        def solve(graph: Graph, start: Schedule | None, time_limit: float) -> Solution:
            search = NearSearch(
                graph,
                replace(self, time_limit=time_limit),
                self._offer,
                start=start,
                progress=progress,
                cancel=cancel,
                stall=self.stall,
                peak_gap=self.peak_gap,
                is_annealed=ordered.is_worthwhile(graph),
                reserve=0.0 if self._is_complete(graph) else _RESERVE * self.gap,
            )
            return search.least_peak() if budget_bytes is None else search.least_cost(budget_bytes)

        is_wanted = self.order == "on" or (self.order == "auto" and ordered.is_worthwhile(graph))
        if not is_wanted:
            return solve(graph, start, self.time_limit)
        limit, seed = self.time_limit, self.seed
        if budget_bytes is None:
            return ordered.least_peak(
                graph, start, solve, time_limit=limit, seed=seed, cancel=cancel
            )
        return ordered.least_cost(
            graph, budget_bytes, start, solve, time_limit=limit, seed=seed, cancel=cancel
        )

    def _is_complete(self, graph: Graph) -> bool:
        return slots.complete_count(graph) <= self.complete_slots

    def _offer(self, graph: Graph, known: Sequence[Schedule], affordable_s: float) -> Slots:
        if self._is_complete(graph):
            return slots.complete(graph, affordable_s)
        idle = max(8, len(graph) // 40)
        near = partial(
            slots.near,
            graph,
            back=_BACK,
            idle=idle,
            region=_REGION,
            known=known,
            affordable_s=affordable_s,
        )
        for every in _EVERY[:-1]:
            offered = near(every=every)
            if offered.optional_count <= self.near_slots:
                return offered
        return near(every=_EVERY[-1])
