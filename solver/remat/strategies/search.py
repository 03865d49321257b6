"""The search that the MILP strategies share: quick outs, schedules by eviction, then programs.

For a cost: keep everything if that fits; refuse a budget below what some operation needs; else
bound the cost by the relaxation at the worst moment and let eviction follow its advice, which is
often optimal. Where it is not, let the program improve on it over slots that can express it, and
where that proves too little, refine it window by window. For a peak: the
smallest that eviction finds, and the program only where it can prove something (complete slots).
Every schedule that comes back was simulated in integers and fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from remat.budget import format_bytes
from remat.errors import RematError, SolverTimeout
from remat.graph import Graph
from remat.milp.advice import Advisor
from remat.milp.backends import Outcome
from remat.milp.bound import least_peak_bytes
from remat.milp.incumbent import fitting, polish, smallest
from remat.milp.pulp_solvers import require
from remat.milp.slots import Slots
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies.base import BoundScope, Solution
from remat.strategies.infeasible import infeasible
from remat.strategies.programs import Options, Programs
from remat.strategies.pursuit import Pursuit
from remat.strategies.quick import quick_schedules
from remat.strategies.refine import recombine, refine

Offer = Callable[[Sequence[Schedule], float], Slots]
"""Builds a slot set that can express the first of the schedules and offers what the others
recompute (complete sets always can), without operations that cost more than so many seconds."""

_HEURISTICS = 0.25
"""The share of the time that eviction may take."""

_WELL, _MORE = 0.1, 0.03
"""Eviction goes on to this share of the gap, for up to this share of the time."""

_SMALLEST = 0.3
"""The share of the time that eviction may take to find the smallest peak."""

_RECOMBINE = 0.2
"""The share of what is left then for the program over what known schedules run again."""

_OVER_SLOTS = 0.45
"""The share of what is left then for the program over slots; windows have the rest."""

_PURSUE = 0.3
"""The share of what is left for programs over moments where there is one core only."""


class Search:
    """One search on one graph.

    `stall` ends a solver run that has not moved for this many seconds, `peak_gap` is how near the
    bound a small peak is good enough; a search with neither is exhaustive.
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
    ) -> None:
        require(options.solver)
        self.graph = graph
        self.options = options
        self.offer = offer
        # Bounds are for the graph's order: a schedule in another would seem to beat them.
        self.start = start if start is not None and start.keeps_order() else None
        self.peak_gap = peak_gap
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
        known = self._fitting(budget_bytes, advisor)
        self._tell_bound(advisor)
        if not known or not self._is_cheap(known[0], advisor.bound_s):
            known = sorted([*known, *self._quick(budget_bytes)], key=programs.time)
        known = known or [self._reach(budget_bytes)]
        if self._is_cheap(known[0], advisor.bound_s):
            return Solution(known[0], advisor.bound_s, "order", True, self.stats)
        return self._improve(budget_bytes, known, advisor)

    def _improve(self, budget_bytes: int, known: Sequence[Schedule], advisor: Advisor) -> Solution:
        """The program over slots and then windows, beside programs over moments."""

        def enough(time_s: float) -> bool:
            return self._is_within_gap(time_s, advisor.bound_s)

        pursuit = Pursuit(self.graph, budget_bytes, advisor, known, enough, self._must_end)
        if self.is_exhaustive:
            return self._over_slots(budget_bytes, pursuit, advisor, enough)
        if self.options.threads > 1:
            pursuit.begin()
        else:
            pursuit.run_for(_PURSUE * (self.programs.deadline - time.monotonic()))
        try:
            return self._over_slots(budget_bytes, pursuit, advisor, enough)
        finally:
            pursuit.end()

    def _over_slots(
        self,
        budget_bytes: int,
        pursuit: Pursuit,
        advisor: Advisor,
        enough: Callable[[float], bool],
    ) -> Solution:
        programs = self.programs
        best = pursuit.best
        left = programs.deadline - time.monotonic()
        if not self.is_exhaustive:
            limit = _RECOMBINE * left
            best = recombine(programs, best, budget_bytes, pursuit, limit, enough)
        hints = [best, *pursuit.hints]
        slots = self.offer(hints, programs.time(best) - self.graph.total_cost_s)
        limit = left if self.is_exhaustive else _OVER_SLOTS * left
        answer, bound_s = programs.solve_cost(slots, budget_bytes, best, limit, enough)
        best = min(answer.schedule or best, pursuit.best, key=programs.time)
        proved = answer.outcome is Outcome.OPTIMAL
        if not self.is_exhaustive:
            if not proved:
                best = refine(programs, best, budget_bytes, pursuit, bound_s, enough)
            pursuit.end()
            best = min(best, pursuit.best, key=programs.time)
        self._tell_bound(advisor)
        bound_s, scope = self._bound(slots, bound_s, best, advisor)
        return Solution(best, bound_s, scope, proved or self._is_cheap(best, bound_s), self.stats)

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
        slots = self.offer([best], math.inf)
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

    def _fitting(self, budget_bytes: int, advisor: Advisor) -> list[Schedule]:
        """Schedules within the budget, the cheapest first; none if none was found."""
        began = time.monotonic()
        until = began + _HEURISTICS * (self.programs.deadline - began)
        found = fitting(
            self.graph,
            budget_bytes,
            known=() if self.start is None else (self.start,),
            advice=advisor.advice(),
            enough=lambda time_s: self._is_enough(time_s, advisor.bound_s, began),
            stop=lambda: self._must_end() or time.monotonic() > until,
        )
        self.programs.clock("heuristics_s", began)
        return [rated.schedule for rated in found]

    def _quick(self, budget_bytes: int | None) -> list[Schedule]:
        """What the quick baselines find; an exhaustive search needs no such help."""
        if self.is_exhaustive:
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
        slots = self.offer([best], math.inf)
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
        return late or time_s - bound_s <= _WELL * self.options.gap * time_s

    def _is_within_gap(self, time_s: float, bound_s: float) -> bool:
        return math.isfinite(time_s) and time_s - bound_s <= self.options.gap * time_s

    def _must_end(self) -> bool:
        return self.programs.is_cancelled() or time.monotonic() > self.programs.deadline
