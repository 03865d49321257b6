"""What a search knows, passed from step to step: schedules, the best first, and what is proved."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from remat.graph import Graph
from remat.heuristics.floor import least_peak_bytes
from remat.heuristics.local_search import Rated
from remat.heuristics.polish import polish, prune
from remat.milp.advice import Advisor
from remat.milp.backends import Outcome
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.strategies.base import Task
from remat.strategies.options import MilpOptions
from remat.strategies.search.deadline import Clock
from remat.strategies.search.runner import MilpRunner

Offer = Callable[[Graph, Sequence[Schedule], float, int], Slots]
"""Builds a slot set of the graph that can express the first of the schedules and offers what the
others recompute (complete sets always can), without operations that cost more than so many
seconds; with a coarseness above 1, fewer slots."""

_NO_LIMIT = 1 << 62

_MOST = 12
"""Schedules that are kept."""


class OverSlots(NamedTuple):
    """What a program over slots came to: the bound that it proves on the objective, and whether it
    had every schedule of the order to choose from."""

    outcome: Outcome
    bound: float | None
    is_complete: bool


class Known:
    """What is known of one graph and one budget; without a budget, of the smallest peak.

    The objective is total time in the graph's unit or, without a budget, the peak in bytes. Steps
    `offer` schedules: each is polished, simulated, and kept if it fits. They work on `graph` within
    `budget_bytes`: those of the task, or less where small values are set aside. A peak of at most
    `target_bytes` is small enough.
    """

    def __init__(
        self,
        task: Task,
        options: MilpOptions,
        offer: Offer,
        *,
        reserve: float = 0.0,
        target_bytes: int | None = None,
        runner: MilpRunner | None = None,
    ) -> None:
        self.task = task
        self.graph = task.graph
        self.budget_bytes = _NO_LIMIT if task.budget_bytes is None else task.budget_bytes
        self.options = options
        self.reserve = reserve
        """The share of the room that small values may be given for good, see `remat.milp.small`."""
        self.target_bytes = target_bytes
        self.runner = runner or MilpRunner(
            task.graph, options, Clock.of(options.time_limit, task.cancel), task.progress
        )
        self.clock, self.stats = self.runner.clock, self.runner.stats
        self.floor_bytes = least_peak_bytes(task.graph)
        self.advisor: Advisor | None = None
        self.over_slots: OverSlots | None = None
        self.rated: list[Rated] = []
        """Schedules that fit, the best first."""
        self._offer = offer
        self._offering = threading.Lock()
        self._spare: list[Rated] = []
        start = task.start
        # Bounds are for the graph's order: a schedule in another would seem to beat them.
        self.start = start if start is not None and start.keeps_order() else None
        self.offer(() if self.start is None else (self.start,))

    # -- schedules

    def offer(self, schedules: Iterable[Schedule]) -> None:
        """Keep those that fit, if they are among the best. Safe from several threads."""
        for schedule in schedules:
            rated = self._polished(self.graph, schedule, self.budget_bytes)
            if rated.peak_bytes <= self.budget_bytes:
                with self._offering:
                    # Of two that are equally good, the one that was there first stays first.
                    kept = dict.fromkeys((*self.rated, rated))
                    self.rated = sorted(kept, key=self.objective_of)[:_MOST]
            elif self.graph is not self.task.graph:
                self._offer_spare(schedule)

    def _offer_spare(self, schedule: Schedule) -> None:
        """Keep one that fits only where nothing is set aside: it may be the best in the end."""
        budget_bytes = self.task.budget_bytes
        if budget_bytes is not None:
            rated = self._polished(self.task.graph, schedule, budget_bytes)
            if rated.peak_bytes <= budget_bytes:
                self._spare.append(rated)

    def _polished(self, graph: Graph, schedule: Schedule, budget_bytes: int) -> Rated:
        if self.is_for_peak:
            return Rated.of(graph, prune(graph, schedule))
        return Rated.of(graph, polish(graph, schedule, budget_bytes))

    def set_aside(self, light: Graph, budget_bytes: int) -> None:
        """From now on work on the graph with small values at no bytes, within so much less."""
        known = [rated.schedule for rated in self.rated]
        self.graph, self.budget_bytes, self.rated = light, budget_bytes, []
        self.runner = replace(self.runner, graph=light)
        self.offer(known)

    @property
    def schedules(self) -> list[Schedule]:
        """Those that fit, the best first."""
        return [rated.schedule for rated in self.rated]

    @property
    def hints(self) -> list[Schedule]:
        """Those that fit, and those that the moments imply, which may not."""
        return [*self.schedules, *(() if self.advisor is None else self.advisor.implied)]

    @property
    def best(self) -> Schedule:
        """The best so far; at least one is known."""
        return self.rated[0].schedule

    def best_of_all(self) -> tuple[Schedule, float]:
        """The best with its objective, also of those that fit only where nothing is set aside, with
        as much kept as there is room for."""
        if self.graph is not self.task.graph:
            self._offer_spare(self.best)
        best = min(self.rated[:1] + self._spare, key=self.objective_of)
        return best.schedule, self.objective_of(best)

    @property
    def objective(self) -> float:
        """Of the best; infinity if nothing is known."""
        return self.objective_of(self.rated[0]) if self.rated else math.inf

    def objective_of(self, rated: Rated) -> float:
        """Total time or, without a budget, the peak."""
        return rated.peak_bytes if self.is_for_peak else rated.time_s

    # -- what is proved

    @property
    def is_for_peak(self) -> bool:
        """Whether the smallest peak is asked for."""
        return self.task.budget_bytes is None

    @property
    def bound(self) -> float:
        """Proved for every schedule of the order."""
        proved = float(self.floor_bytes) if self.is_for_peak else self.graph.total_cost_s
        if self.advisor is not None:
            proved = max(proved, self.advisor.bound_s)
        found = self.over_slots
        if found is None or not found.is_complete or found.bound is None:
            return proved
        # Schedules that the slots leave out as too dear are no better than what is known.
        return max(proved, min(found.bound, self.objective))

    def is_enough(self, objective: float, share: float = 1.0) -> bool:
        """Whether that is within this share of the gap asked for, or small enough."""
        if self.target_bytes is not None:
            return objective <= self.target_bytes
        if self.is_for_peak:
            return objective <= self.bound * (1 + share * self.options.peak_gap)
        gap = share * self.options.gap
        return math.isfinite(objective) and objective - self.bound <= gap * objective

    @property
    def is_within_gap(self) -> bool:
        """Whether the best is."""
        return self.is_enough(self.objective)

    # -- programs

    def offered(self, coarseness: int = 1) -> Slots:
        """The slots that can improve on the best; or so many times fewer."""
        affordable_s = math.inf if self.is_for_peak else self.objective - self.graph.total_cost_s
        return self._offer(self.graph, [self.best], affordable_s, coarseness)

    def smallest(self, target_bytes: int | None = None) -> Known:
        """What is known of the smallest peak, or of one that is small enough, of the same search:
        with its clock, its runner and its stats."""
        task = replace(self.task, budget_bytes=None, start=self.start)
        runner = replace(self.runner, graph=task.graph)
        return Known(task, self.options, self._offer, target_bytes=target_bytes, runner=runner)
