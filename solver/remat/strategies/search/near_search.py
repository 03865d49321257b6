"""The search for a nearly optimal schedule of a graph of any size, with a proof of how near it is.

What eviction and the bound at moments leave open (`search`) is closed from both
sides until the gap or the time is reached. Quick baselines, annealing where the graph is no
training step, and programs in which identical blocks decide together (`tied`)
give schedules to begin from. Then the slots that can improve on them are sifted by the linear
relaxation, a program runs over those that pass, one over all slots proves it, and where that proves
too little, windows refine it. Beside all that, programs over more and more moments raise the bound
that holds for every schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.heuristics.local_search import polish, prune
from remat.milp.advice import Advisor
from remat.milp.backends import Outcome
from remat.milp.slots import Slots
from remat.milp.small import set_aside
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.search.annealing import annealed
from remat.strategies.search.mishaps import tell
from remat.strategies.search.programs import MilpOptions, MilpRunner
from remat.strategies.search.pursuit import Pursuit
from remat.strategies.search.quick import quick_schedules
from remat.strategies.search.refine import refine, sift
from remat.strategies.search.search import Offer, OverSlots, Search
from remat.strategies.search.tied import blocks_to_tie, tied_schedule

_HEURISTICS, _BEFORE_ANNEALING = 0.2, 0.1
"""The share of the time that eviction may take; less where annealing follows, which finds far
better schedules."""

_AFTER_TIED = 0.08
"""The share of the time for eviction where blocks that decide together went before."""

_TIED = 0.5
"""The share of what is left that they may take."""

_QUICK = 0.2
"""The share of what is left that the quick baselines may take: some on graphs that are no training
step are not quick."""

_ANNEAL, _ANNEAL_ON = 0.5, 0.15
"""The share of what is left then that annealing may take, and where the gap is reached."""

_SIFT = 0.4
"""The share of what is left then for the program over what its relaxation runs again."""

_OVER_SLOTS = 0.6
"""The share of what is left then for the program over slots; windows have the rest."""

_PURSUE = 0.3
"""The share of what is left for programs over moments where there is one core only."""

_ROUNDING = 1e-6
"""Of a bound: what a solver's tolerances may have added to it."""

Enough = Callable[[float], bool]
"""Says of a time in seconds that no better one is wanted."""


class NearSearch(Search):
    """`Search` that ends at the gap. `is_annealed` says to anneal before the programs, which places
    a few dozen recomputations among a thousand operations better than they do where the graph is
    no training step. `reserve` is the share of the room that small values may be given for good,
    see `remat.milp.small`.
    """

    def __init__(
        self,
        task: Task,
        options: MilpOptions,
        offer: Offer,
        *,
        stall: float = math.inf,
        peak_gap: float = 0.0,
        is_annealed: bool = False,
        reserve: float = 0.0,
    ) -> None:
        super().__init__(task, options, offer, stall=stall, peak_gap=peak_gap)
        self.is_annealed = is_annealed
        self.reserve = reserve
        self.heuristics_share = _BEFORE_ANNEALING if is_annealed else _HEURISTICS

    def _within(self, budget_bytes: int, advisor: Advisor) -> Solution:
        self.found = self._attempt(
            "identical blocks", lambda: self._tied(budget_bytes, advisor), []
        )
        programs, room_bytes, known = self._known(budget_bytes, advisor)
        quick: list[Schedule] = []
        if not known or not self._is_cheap(known[0], advisor.bound_s):
            quick = self._attempt("baselines", lambda: self._quick(budget_bytes), [])
            known = _with(programs, room_bytes, known, quick)
        if self.is_annealed:
            found = self._attempt(
                "annealing",
                lambda: [self._anneal(programs, room_bytes, known, advisor.bound_s)],
                [],
            )
            known = _with(programs, room_bytes, known, found)
        known = known or [self._reach(budget_bytes)]
        if self._is_cheap(known[0], advisor.bound_s):
            return Solution(known[0], advisor.bound_s, "order", True, self.stats)
        found = self._improve(programs, room_bytes, known, advisor)
        # What fits only where nothing is set aside.
        also = [*quick, *([] if self.start is None else [self.start])]
        best = _with(self.programs, budget_bytes, [found.schedule], also)[0]
        bound_s = None if found.bound is None else min(found.bound, programs.time(best))
        return replace(found, schedule=best, bound=bound_s)

    def _known(
        self, budget_bytes: int, advisor: Advisor
    ) -> tuple[MilpRunner, int, Sequence[Schedule]]:
        """Programs, the budget for them, and schedules within that, the cheapest first: with small
        values set aside, or on all values where eviction finds nothing then, or nothing at all, or
        where schedules are known that use the room to the last byte."""
        room_bytes = budget_bytes - self.graph.constant_bytes
        light, reserve_bytes = set_aside(self.graph, int(self.reserve * room_bytes))
        if reserve_bytes and not self.found:
            left_bytes = budget_bytes - reserve_bytes
            if known := self._fitting(light, left_bytes, advisor):
                self.stats["reserve_bytes"] = reserve_bytes
                return replace(self.programs, graph=light), left_bytes, known
        return self.programs, budget_bytes, self._fitting(self.graph, budget_bytes, advisor)

    def _improve(
        self, programs: MilpRunner, budget_bytes: int, known: Sequence[Schedule], advisor: Advisor
    ) -> Solution:
        """The program over slots and then windows, beside programs over moments."""

        def enough(time_s: float) -> bool:
            return self._is_within_gap(time_s, advisor.bound_s)

        pursuit = Pursuit(programs.graph, budget_bytes, advisor, known, enough, self._must_end)
        if self.options.threads > 1:
            pursuit.begin()
        else:
            pursuit.run_for(_PURSUE * self._left_s())
        try:
            best = self._attempt(
                "sifting",
                lambda: self._sifted(programs, budget_bytes, pursuit, enough),
                pursuit.best,
            )
            found = self._attempt(
                "the program over slots",
                lambda: self._over_offered(programs, budget_bytes, best, enough),
                OverSlots.none(best),
            )
            best = found.answer.schedule or best
            if found.answer.outcome is not Outcome.OPTIMAL:
                best = self._attempt(
                    "windows",
                    lambda: refine(programs, best, budget_bytes, pursuit, found.bound_s, enough),
                    best,
                )
        finally:
            pursuit.end()
        if pursuit.error is not None:
            tell(self.stats, "programs over moments", pursuit.error)
        best = min(best, pursuit.best, key=programs.time)
        if found.bound_s is not None and not found.is_complete:
            least_s = (1 - self.options.gap - _ROUNDING) * found.bound_s
            if programs.time(best) < least_s:
                # Better by far than all over the slots, which therefore say nothing about it.
                found = found._replace(bound_s=None)
        return self._judged(best, found, advisor)

    def _sifted(
        self, programs: MilpRunner, budget_bytes: int, pursuit: Pursuit, enough: Enough
    ) -> Schedule:
        """The best schedule after sifting the slots."""
        best = pursuit.best
        slots = self._offered(programs, best)
        best = sift(programs, best, budget_bytes, slots, _SIFT * self._left_s(), enough)
        return min(best, pursuit.best, key=programs.time)

    def _over_offered(
        self, programs: MilpRunner, budget_bytes: int, best: Schedule, enough: Enough
    ) -> OverSlots:
        """The program over all slots that can improve on the best schedule."""
        slots = self._offered(programs, best)
        limit = _OVER_SLOTS * self._left_s()
        answer, bound_s = programs.solve_cost(slots, budget_bytes, best, limit, enough)
        return OverSlots(answer, bound_s, slots.complete)

    def _offered(self, programs: MilpRunner, best: Schedule) -> Slots:
        affordable_s = programs.time(best) - self.graph.total_cost_s
        return self.offer(programs.graph, [best], affordable_s)

    def _anneal(
        self, programs: MilpRunner, budget_bytes: int, known: Sequence[Schedule], bound_s: float
    ) -> Schedule:
        """The cheapest schedule that annealing finds in the graph's order; it goes on for a while
        where the gap is reached."""
        best = known[0] if known else Schedule.keep_all(self.graph)
        time_s = programs.time(best) if known else math.inf
        if self._is_well_within_gap(time_s, bound_s):
            return best
        share = _ANNEAL_ON if self._is_within_gap(time_s, bound_s) else _ANNEAL
        return annealed(programs, best, budget_bytes, share * self._left_s())

    def _tied(self, budget_bytes: int, advisor: Advisor) -> list[Schedule]:
        """What identical blocks that decide together come to, where there are many."""
        began = time.monotonic()
        blocks = blocks_to_tie(self.graph)
        if blocks is None:
            return []
        found = tied_schedule(
            self.programs,
            blocks,
            budget_bytes,
            time_limit=_TIED * self._left_s(),
            enough=lambda time_s: self._is_within_gap(time_s, advisor.bound_s),
        )
        self.programs.clock("blocks_s", began)
        self.heuristics_share = _AFTER_TIED
        return [] if found is None else [polish(self.graph, found, budget_bytes)]

    def _quick(self, budget_bytes: int | None) -> list[Schedule]:
        """What the quick baselines find. In an order that another search chose they are none, and
        slow."""
        if self.is_annealed and self.start is not None:
            return []
        return list(quick_schedules(self.graph, budget_bytes, self._stop_after(_QUICK)))

    def _small(self) -> list[Schedule]:
        return [*self._quick(None), *super()._small()]

    def _nearest(self, best: Schedule | None) -> Schedule:
        return best or self._smallest()


def _with(
    programs: MilpRunner, budget_bytes: int, known: Sequence[Schedule], more: Sequence[Schedule]
) -> list[Schedule]:
    """All schedules that fit, the cheapest first."""
    pruned = [prune(programs.graph, schedule) for schedule in more]
    fits = [schedule for schedule in pruned if programs.peak(schedule) <= budget_bytes]
    return sorted([*known, *fits], key=programs.time)
