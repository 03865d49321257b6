"""The search that the MILP strategies share: quick outs, schedules by eviction, then programs.

For a cost: keep everything if that fits; refuse a budget below what some operation needs; else
bound the cost by the relaxation at the worst moment and let eviction follow its advice, which is
often optimal. Where it is not, sift the slots that can improve on it by the linear relaxation, run
the program over those that pass, prove it with the program over all, and where that proves too
little, refine it window by window. For a peak: the
smallest that eviction finds, and the program only where it can prove something (complete slots).
Every schedule that comes back was simulated in integers and fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.budget import format_bytes
from remat.errors import RematError, SolverTimeout
from remat.graph import Graph
from remat.milp.advice import Advisor
from remat.milp.backends import Outcome
from remat.milp.bound import least_peak_bytes
from remat.milp.incumbent import fitting, polish, prune, smallest
from remat.milp.pulp_solvers import require
from remat.milp.slots import Slots
from remat.milp.small import set_aside
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies.annealing import annealed
from remat.strategies.base import BoundScope, Solution
from remat.strategies.infeasible import infeasible
from remat.strategies.programs import Options, Programs
from remat.strategies.pursuit import Pursuit
from remat.strategies.quick import quick_schedules
from remat.strategies.refine import refine, sift

Offer = Callable[[Graph, Sequence[Schedule], float], Slots]
"""Builds a slot set of the graph that can express the first of the schedules and offers what the
others recompute (complete sets always can), without operations that cost more than so many
seconds."""

_HEURISTICS = 0.2
"""The share of the time that eviction may take."""

_WELL, _MORE = 0.1, 0.03
"""Eviction goes on to this share of the gap, for up to this share of the time."""

_BEFORE_ANNEALING = 0.1
"""The same where annealing follows, which finds far better schedules."""

_ANNEAL, _ANNEAL_ON = 0.5, 0.15
"""The share of what is left then that annealing may take, and where the gap is reached."""

_SMALLEST = 0.3
"""The share of the time that eviction may take to find the smallest peak."""

_SIFT = 0.4
"""The share of what is left then for the program over what its relaxation runs again."""

_OVER_SLOTS = 0.6
"""The share of what is left then for the program over slots; windows have the rest."""

_PURSUE = 0.3
"""The share of what is left for programs over moments where there is one core only."""


class Search:
    """One search on one graph.

    `stall` ends a solver run that has not moved for this many seconds, `peak_gap` is how near the
    bound a small peak is good enough; a search with neither is exhaustive. `is_annealed` says to
    anneal before the programs (`remat.order`), which places a few dozen recomputations among a
    thousand operations better than they do where the graph is no training step. `reserve` is the
    share of the room that small values may be given for good, see `remat.milp.small`.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        offer: Offer,
        *,
        start: Schedule | None,
        progress: ProgressCallback | None,
        cancel: Cancel | None,
        stall: float = math.inf,
        peak_gap: float = 0.0,
        is_annealed: bool = False,
        reserve: float = 0.0,
    ) -> None:
        require(options.solver)
        self.graph = graph
        self.options = options
        self.offer = offer
        # Bounds are for the graph's order: a schedule in another would seem to beat them.
        self.start = start if start is not None and start.keeps_order() else None
        self.peak_gap = peak_gap
        self.is_annealed = is_annealed
        self.reserve = reserve
        self.is_exhaustive = stall == math.inf and peak_gap == 0
        self.programs = Programs(graph, options, progress, cancel, stall, peak_gap)
        self.stats = self.programs.stats
        self.floor_bytes = least_peak_bytes(graph)

    def least_cost(self, budget_bytes: int) -> Solution:
        """The cheapest schedule within the budget. Raises `InfeasibleBudget`."""
        programs = self.programs
        keep_all = Schedule.keep_all(self.graph)
        if simulate(self.graph, keep_all).peak_bytes <= budget_bytes:
            return Solution(keep_all, self.graph.total_cost_s, "all orders", True, self.stats)
        if self.floor_bytes > budget_bytes:
            best = self.least_peak().schedule if self.is_exhaustive else self._smallest()
            need = f"one operation alone needs {self.floor_bytes:,} bytes"
            raise infeasible(self.graph, budget_bytes, programs.peak(best), need, proved=True)
        advisor = self._advisor(budget_bytes)
        programs, room_bytes, known = self._known(budget_bytes, advisor)
        self._tell_bound(advisor)
        if known and self._is_cheap(known[0], advisor.bound_s) and not self.is_annealed:
            return Solution(known[0], advisor.bound_s, "order", True, self.stats)
        quick = self._quick(budget_bytes)
        also = [prune(programs.graph, schedule) for schedule in quick]
        also = [schedule for schedule in also if programs.peak(schedule) <= room_bytes]
        known = sorted([*known, *also], key=programs.time)
        if self.is_annealed:
            best = known[0] if known else keep_all
            found = self._anneal(programs, room_bytes, best, advisor.bound_s)
            known = [found, *known] if programs.peak(found) <= room_bytes else known
        known = known or [self._reach(budget_bytes)]
        if self._is_cheap(known[0], advisor.bound_s):
            return Solution(known[0], advisor.bound_s, "order", True, self.stats)
        found = self._improve(programs, room_bytes, known, advisor)
        # What fits only where nothing is set aside.
        whole = [*quick, *([] if self.start is None else [self.start])]
        whole = [s for s in whole if self.programs.peak(s) <= budget_bytes]
        best = min([found.schedule, *whole], key=programs.time)
        bound_s = None if found.bound is None else min(found.bound, programs.time(best))
        return replace(found, schedule=best, bound=bound_s)

    def _known(
        self, budget_bytes: int, advisor: Advisor
    ) -> tuple[Programs, int, Sequence[Schedule]]:
        """Programs, the budget for them, and schedules within that, the cheapest first: with small
        values set aside, or on all values where eviction finds nothing then, or nothing at all."""
        room_bytes = budget_bytes - self.graph.constant_bytes
        light, reserve_bytes = set_aside(self.graph, int(self.reserve * room_bytes))
        if reserve_bytes:
            programs = replace(self.programs, graph=light)
            left_bytes = budget_bytes - reserve_bytes
            if known := self._fitting(light, left_bytes, advisor):
                self.stats["reserve_bytes"] = reserve_bytes
                return programs, left_bytes, known
        known = self._fitting(self.graph, budget_bytes, advisor)
        return self.programs, budget_bytes, known

    def _improve(
        self,
        programs: Programs,
        budget_bytes: int,
        known: Sequence[Schedule],
        advisor: Advisor,
    ) -> Solution:
        """The program over slots and then windows, beside programs over moments."""

        def enough(time_s: float) -> bool:
            return self._is_within_gap(time_s, advisor.bound_s)

        pursuit = Pursuit(programs.graph, budget_bytes, advisor, known, enough, self._must_end)
        if self.options.threads > 1 and not self.is_exhaustive:
            pursuit.begin()
        elif not self.is_exhaustive:
            pursuit.run_for(_PURSUE * (programs.deadline - time.monotonic()))
        try:
            best, slots, bound_s, proved = self._over_slots(programs, budget_bytes, pursuit, enough)
        finally:
            pursuit.end()
        best = min(best, pursuit.best, key=programs.time)
        self._tell_bound(advisor)
        if bound_s is not None and programs.time(best) < (1 - self.options.gap) * bound_s:
            # Better than all over the slots by far, which they therefore say nothing about.
            bound_s, proved = None, False
        bound_s, scope = self._bound(slots, bound_s, best, advisor)
        return Solution(best, bound_s, scope, proved or self._is_cheap(best, bound_s), self.stats)

    def _over_slots(
        self,
        programs: Programs,
        budget_bytes: int,
        pursuit: Pursuit,
        enough: Callable[[float], bool],
    ) -> tuple[Schedule, Slots, float | None, bool]:
        """The best schedule, the slots offered, the bound over them, and whether it is proved."""

        def offer(best: Schedule) -> Slots:
            affordable_s = programs.time(best) - self.graph.total_cost_s
            return self.offer(programs.graph, [best], affordable_s)

        best = pursuit.best
        slots = offer(best)
        if not self.is_exhaustive:
            limit = _SIFT * (programs.deadline - time.monotonic())
            best = sift(programs, best, budget_bytes, slots, limit, enough)
            best = min(best, pursuit.best, key=programs.time)
            slots = offer(best)
        left = programs.deadline - time.monotonic()
        limit = left if self.is_exhaustive else _OVER_SLOTS * left
        answer, bound_s = programs.solve_cost(slots, budget_bytes, best, limit, enough)
        best = min(answer.schedule or best, pursuit.best, key=programs.time)
        proved = answer.outcome is Outcome.OPTIMAL
        if not self.is_exhaustive and not proved:
            best = refine(programs, best, budget_bytes, pursuit, bound_s, enough)
        return best, slots, bound_s, proved

    def _bound(
        self, slots: Slots, bound_s: float | None, best: Schedule, advisor: Advisor
    ) -> tuple[float, BoundScope]:
        """The higher bound, or the one for the wider space where that proves enough."""
        if bound_s is None or bound_s < advisor.bound_s or self._is_cheap(best, advisor.bound_s):
            return advisor.bound_s, "order"
        # Schedules that the slots leave out as too dear are no better than what is known.
        return min(bound_s, self.programs.time(best)), "order" if slots.complete else "slots"

    def least_peak(self) -> Solution:
        """A schedule with the smallest peak; the bound holds for every schedule of the order."""
        best = self._smallest()
        floor = float(self.floor_bytes)
        if self._is_small(best, floor) or self.programs.is_cancelled():
            return Solution(best, floor, "order", self._is_small(best, floor), self.stats)
        slots = self.offer(self.graph, [best], math.inf)
        if not slots.complete:
            return Solution(best, floor, "order", False, self.stats)
        best, bound, outcome = self._shrink(slots, best)
        floor = max(floor, bound)
        proved = outcome is Outcome.OPTIMAL or self._is_small(best, floor)
        return Solution(best, floor, "order", proved, self.stats)

    def _advisor(self, budget_bytes: int) -> Advisor:
        began = time.monotonic()
        advisor = Advisor(
            self.graph,
            budget_bytes,
            gap=self.options.gap,
            deadline=self.programs.deadline,
            stop=self._must_end,
        )
        self.programs.clock("bound_s", began)
        return advisor

    def _fitting(self, graph: Graph, budget_bytes: int, advisor: Advisor) -> list[Schedule]:
        """Schedules within the budget, the cheapest first; none if none was found."""
        began = time.monotonic()
        share = _BEFORE_ANNEALING if self.is_annealed else _HEURISTICS
        until = began + share * (self.programs.deadline - began)
        found = fitting(
            graph,
            budget_bytes,
            known=() if self.start is None else (prune(graph, self.start),),
            advice=advisor.advice(),
            enough=lambda time_s: self._is_enough(time_s, advisor.bound_s, began),
            stop=lambda: self._must_end() or time.monotonic() > until,
        )
        self.programs.clock("heuristics_s", began)
        return [rated.schedule for rated in found]

    def _anneal(
        self, programs: Programs, budget_bytes: int, best: Schedule, bound_s: float
    ) -> Schedule:
        """The cheapest schedule that annealing finds in the graph's order; it goes on for a while
        where the gap is reached."""
        is_fit = programs.peak(best) <= budget_bytes
        time_s = programs.time(best) if is_fit else math.inf
        if self._is_well_within_gap(time_s, bound_s):
            return best
        share = _ANNEAL_ON if self._is_within_gap(time_s, bound_s) else _ANNEAL
        limit = share * (programs.deadline - time.monotonic())
        return annealed(programs, best, budget_bytes, limit)

    def _quick(self, budget_bytes: int | None) -> list[Schedule]:
        """What the quick baselines find; an exhaustive search needs no such help, nor does one in
        an order that another search chose: there the baselines are none, and slow."""
        if self.is_exhaustive or (self.is_annealed and self.start is not None):
            return []
        return list(quick_schedules(self.graph, budget_bytes, self._must_end))

    def _tell_bound(self, advisor: Advisor) -> None:
        total_s = self.graph.total_cost_s
        self.stats["order_bound"] = advisor.bound_s / total_s - 1 if total_s > 0 else 0.0

    def _smallest(self, target_bytes: int | None = None) -> Schedule:
        """The smallest peak that eviction finds, down to a target."""
        began = time.monotonic()
        target = self.floor_bytes if target_bytes is None else target_bytes
        until = began + _SMALLEST * (self.programs.deadline - began)
        known = [*self._quick(None), *([] if self.start is None else [self.start])]
        found = smallest(
            self.graph,
            target_bytes=target,
            start=min(known, key=self.programs.peak, default=None),
            stop=lambda: self._must_end() or time.monotonic() > until,
        )
        self.programs.clock("heuristics_s", began)
        return found.schedule

    def _shrink(
        self, slots: Slots, best: Schedule, target_bytes: int | None = None
    ) -> tuple[Schedule, float, Outcome]:
        """The smaller peak of `best` and the program's, the bound proved over these slots."""
        left = self.programs.deadline - time.monotonic()
        answer, bound = self.programs.solve_peak(slots, best, left, target_bytes)
        if answer.schedule is not None:
            best = min(best, answer.schedule, key=self.programs.peak)
        return best, bound or 0.0, answer.outcome

    def _reach(self, budget_bytes: int) -> Schedule:
        """A schedule within a budget that is hard to meet; the program is asked where eviction
        finds none. Raises `InfeasibleBudget` or, if time ran out before, `SolverTimeout`."""
        programs = self.programs
        best = self._smallest(budget_bytes)
        if programs.peak(best) <= budget_bytes:
            return polish(self.graph, best, budget_bytes)
        slots = self.offer(self.graph, [best], math.inf)
        best, bound, outcome = self._shrink(slots, best, budget_bytes)
        if programs.peak(best) <= budget_bytes:
            return best
        if programs.is_cancelled():
            raise RematError("the solve was cancelled before any schedule was known")
        is_optimum = outcome is Outcome.OPTIMAL and self.peak_gap == 0
        if slots.complete and (is_optimum or bound > budget_bytes * (1 + 1e-6)):
            if self.is_exhaustive:
                # The run above ended as soon as the budget was excluded.
                best = min(best, self.least_peak().schedule, key=programs.peak)
            reason = "no schedule of this order of the operations fits"
            raise infeasible(self.graph, budget_bytes, programs.peak(best), reason, proved=True)
        if time.monotonic() > programs.deadline:
            raise SolverTimeout(
                f"no schedule within {format_bytes(budget_bytes)} was found in "
                f"{self.options.time_limit:g} s, and it is not excluded that there is one; the "
                f"smallest peak found is {programs.peak(best):,} bytes: "
                "raise `time_limit` or the budget"
            )
        reason = "no schedule was found that fits, which is no proof that there is none"
        raise infeasible(self.graph, budget_bytes, programs.peak(best), reason, proved=False)

    def _is_small(self, schedule: Schedule, bound_bytes: float) -> bool:
        return self.programs.peak(schedule) <= bound_bytes * (1 + self.peak_gap)

    def _is_cheap(self, schedule: Schedule, bound_s: float | None) -> bool:
        return bound_s is not None and self._is_within_gap(self.programs.time(schedule), bound_s)

    def _is_enough(self, time_s: float, bound_s: float, began: float) -> bool:
        """Within the gap; and well within it if that is soon done."""
        if not self._is_within_gap(time_s, bound_s):
            return False
        late = time.monotonic() - began > _MORE * self.options.time_limit
        return late or self._is_well_within_gap(time_s, bound_s)

    def _is_well_within_gap(self, time_s: float, bound_s: float) -> bool:
        return math.isfinite(time_s) and time_s - bound_s <= _WELL * self.options.gap * time_s

    def _is_within_gap(self, time_s: float, bound_s: float) -> bool:
        return math.isfinite(time_s) and time_s - bound_s <= self.options.gap * time_s

    def _must_end(self) -> bool:
        return self.programs.is_cancelled() or time.monotonic() > self.programs.deadline
