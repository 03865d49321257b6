"""The search for a proved optimum; `near_search` builds on it for graphs of any size.

For a cost: keep everything if that fits; refuse a budget below what some operation needs; else
bound the cost by the relaxation at the worst moment and let eviction follow its advice, which is
often optimal. Where it is not, run the program. For a peak: the smallest that eviction finds, and
the program where it can prove something (complete slots). Every schedule that comes back was
simulated in integers and fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from remat.budget import format_bytes
from remat.errors import RematError, SolverError, SolverTimeout
from remat.graph import Graph
from remat.heuristics.floor import least_peak_bytes
from remat.heuristics.local_search import Rated, fitting, polish, prune, smallest
from remat.milp.advice import Advisor
from remat.milp.backends import Outcome, SolverRun
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.infeasible import infeasible
from remat.strategies.search.mishaps import T, attempt
from remat.strategies.search.programs import MilpOptions, MilpRunner

Offer = Callable[[Graph, Sequence[Schedule], float], Slots]
"""Builds a slot set of the graph that can express the first of the schedules and offers what the
others recompute (complete sets always can), without operations that cost more than so many
seconds."""

_WELL, _MORE = 0.1, 0.03
"""Eviction goes on to this share of the gap, for up to this share of the time."""

_SMALLEST = 0.2
"""The share of the time that eviction may take to find the smallest peak."""


class OverSlots(NamedTuple):
    """What a program over slots came to: its answer, the bound that it proves on total time, and
    whether it had every schedule of the order to choose from."""

    answer: SolverRun
    bound_s: float | None
    is_complete: bool

    @classmethod
    def none(cls, best: Schedule) -> OverSlots:
        """Nothing but what was known."""
        return cls(*MilpRunner.kept(best), False)


class Search:
    """One search on one graph, over all slots that `offer` gives, to the end.

    `stall` ends a solver run that has not moved for this many seconds, `peak_gap` is how near the
    bound a small peak is good enough.
    """

    heuristics_share = 0.25
    """The share of the time that eviction may take."""

    def __init__(
        self,
        task: Task,
        options: MilpOptions,
        offer: Offer,
        *,
        stall: float = math.inf,
        peak_gap: float = 0.0,
    ) -> None:
        self.graph = graph = task.graph
        self.budget_bytes = task.budget_bytes
        self.options = options
        self.offer = offer
        # Bounds are for the graph's order: a schedule in another would seem to beat them.
        start = task.start
        self.start = start if start is not None and start.keeps_order() else None
        self.found: list[Schedule] = []
        """Schedules within the budget that eviction goes on from, beside the start."""
        self.peak_gap = peak_gap
        self.programs = MilpRunner(graph, options, task.progress, task.cancel, stall, peak_gap)
        self.stats = self.programs.stats
        self.floor_bytes = least_peak_bytes(graph)

    def answer(self) -> Solution:
        """What the task asks for. Raises `InfeasibleBudget`."""
        return (
            self.least_peak() if self.budget_bytes is None else self.least_cost(self.budget_bytes)
        )

    def least_cost(self, budget_bytes: int) -> Solution:
        """The cheapest schedule within the budget. Raises `InfeasibleBudget`."""
        keep_all = Schedule.keep_all(self.graph)
        if simulate(self.graph, keep_all).peak_bytes <= budget_bytes:
            return Solution(keep_all, self.graph.total_cost_s, "all orders", True, self.stats)
        if self.floor_bytes > budget_bytes:
            peak_bytes = self.programs.peak(self._nearest(None))
            need = f"one operation alone needs {self.floor_bytes:,} bytes"
            raise infeasible(self.graph, budget_bytes, peak_bytes, need, proved=True)
        return self._within(budget_bytes, self._advisor(budget_bytes))

    def least_peak(self) -> Solution:
        """A schedule with the smallest peak; the bound holds for every schedule of the order."""
        best = self._smallest()
        floor = float(self.floor_bytes)
        if self._is_small(best, floor) or self.programs.is_cancelled():
            return Solution(best, floor, "order", self._is_small(best, floor), self.stats)
        slots = self.offer(self.graph, [best], math.inf)
        if not slots.complete:
            return Solution(best, floor, "order", False, self.stats)
        best, floor, outcome = self._shrink(slots, best)
        proved = outcome is Outcome.OPTIMAL or self._is_small(best, floor)
        return Solution(best, floor, "order", proved, self.stats)

    def _within(self, budget_bytes: int, advisor: Advisor) -> Solution:
        """What `least_cost` answers where something has to run again."""
        known = self._fitting(self.graph, budget_bytes, advisor) or [self._reach(budget_bytes)]
        best = known[0]
        if self._is_cheap(best, advisor.bound_s):
            return Solution(best, advisor.bound_s, "order", True, self.stats)
        return self._judged(best, self._over_slots(known, budget_bytes, advisor), advisor)

    def _over_slots(
        self, known: Sequence[Schedule], budget_bytes: int, advisor: Advisor
    ) -> OverSlots:
        """The program over all slots, begun from what is known, the cheapest first."""
        programs, best = self.programs, known[0]

        def work() -> OverSlots:
            slots = self.offer(self.graph, known, programs.time(best) - self.graph.total_cost_s)
            answer, bound_s = programs.solve_cost(
                slots,
                budget_bytes,
                best,
                enough=lambda time_s: self._is_within_gap(time_s, advisor.bound_s),
            )
            return OverSlots(answer, bound_s, slots.complete)

        return self._attempt("the program over slots", work, OverSlots.none(best))

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

    def _judged(self, best: Schedule, found: OverSlots, advisor: Advisor) -> Solution:
        """The cheaper of the schedules, with what is proved for every schedule of the order.

        What is proved over slots says something about the order only where they are complete.
        Elsewhere it is told as a fact beside that.
        """
        best = min(best, found.answer.schedule or best, key=self.programs.time)
        proved_s = advisor.bound_s
        if found.bound_s is not None:
            # Schedules that the slots leave out as too dear are no better than what is known.
            bound_s = min(found.bound_s, self.programs.time(best))
            if found.is_complete:
                proved_s = max(proved_s, bound_s)
            else:
                self.stats["slots_bound"] = bound_s / self.graph.total_cost_s - 1
        is_optimum = found.is_complete and found.answer.outcome is Outcome.OPTIMAL
        proved = is_optimum or self._is_cheap(best, proved_s)
        return Solution(best, proved_s, "order", proved, self.stats)

    def _fitting(self, graph: Graph, budget_bytes: int, advisor: Advisor) -> list[Schedule]:
        """Schedules within the budget, the cheapest first; none if none was found."""
        began = time.monotonic()
        known = [prune(graph, schedule) for schedule in (*self.found, self.start) if schedule]
        found = self._attempt(
            "eviction",
            lambda: fitting(
                graph,
                budget_bytes,
                known=known,
                advice=advisor.advice(),
                enough=lambda time_s: self._is_enough(time_s, advisor.bound_s, began),
                stop=self._stop_after(self.heuristics_share),
            ),
            None,
        )
        self.programs.clock("heuristics_s", began)
        if found is None:
            rated = (Rated.of(graph, schedule) for schedule in known)
            found = sorted((r for r in rated if r.peak_bytes <= budget_bytes), key=_by_time)
        return [rated.schedule for rated in found]

    def _smallest(self, target_bytes: int | None = None) -> Schedule:
        """The smallest peak that eviction finds, down to a target."""
        began = time.monotonic()
        target = self.floor_bytes if target_bytes is None else target_bytes
        stop = self._stop_after(_SMALLEST)
        found = smallest(
            self.graph,
            target_bytes=target,
            start=min(self._small(), key=self.programs.peak, default=None),
            stop=stop,
        )
        self.programs.clock("heuristics_s", began)
        return found.schedule

    def _small(self) -> list[Schedule]:
        """Schedules with small peaks to begin from."""
        return [] if self.start is None else [self.start]

    def _nearest(self, best: Schedule | None) -> Schedule:
        """Where a budget is impossible, the schedule with the smallest peak; `best` is known."""
        found = self.least_peak().schedule
        return found if best is None else min(best, found, key=self.programs.peak)

    def _shrink(
        self, slots: Slots, best: Schedule, target_bytes: int | None = None
    ) -> tuple[Schedule, float, Outcome]:
        """The smaller peak of `best` and the program's, the bound proved over these slots."""
        answer, bound = self.programs.solve_peak(slots, best, self._left_s(), target_bytes)
        best = min(best, answer.schedule or best, key=self.programs.peak)
        floor = float(self.floor_bytes)
        return best, floor if bound is None else max(floor, bound), answer.outcome

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
        if programs.failure:
            raise SolverError(
                f"{programs.failure}. No schedule within {format_bytes(budget_bytes)} is known "
                f"without it; the smallest peak found is {programs.peak(best):,} bytes: a budget "
                "of that needs no solver"
            )
        is_optimum = outcome is Outcome.OPTIMAL and self.peak_gap == 0
        if slots.complete and (is_optimum or bound > budget_bytes * (1 + 1e-6)):
            # The run above may have ended as soon as the budget was excluded.
            peak_bytes = programs.peak(self._nearest(best))
            reason = "no schedule of this order of the operations fits"
            raise infeasible(self.graph, budget_bytes, peak_bytes, reason, proved=True)
        if self._must_end():
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

    def _is_cheap(self, schedule: Schedule, bound_s: float) -> bool:
        return self._is_within_gap(self.programs.time(schedule), bound_s)

    def _is_enough(self, time_s: float, bound_s: float, began: float) -> bool:
        """Within the gap; and well within it if that is soon done."""
        if not self._is_within_gap(time_s, bound_s):
            return False
        late = time.monotonic() - began > _MORE * self.options.time_limit
        return late or self._is_well_within_gap(time_s, bound_s)

    def _is_well_within_gap(self, time_s: float, bound_s: float) -> bool:
        return self._is_within_gap(time_s, bound_s, _WELL)

    def _is_within_gap(self, time_s: float, bound_s: float, share: float = 1.0) -> bool:
        return math.isfinite(time_s) and time_s - bound_s <= share * self.options.gap * time_s

    def _attempt(self, part: str, work: Callable[[], T], otherwise: T) -> T:
        return attempt(self.stats, part, work, otherwise)

    def _left_s(self) -> float:
        return self.programs.deadline - time.monotonic()

    def _stop_after(self, share: float) -> Callable[[], bool]:
        """Says when this share of what is left of the time has passed, or the search must end."""
        until = time.monotonic() + share * self._left_s()
        return lambda: self._must_end() or time.monotonic() > until

    def _must_end(self) -> bool:
        return self.programs.is_cancelled() or self._left_s() < 0


def _by_time(rated: Rated) -> float:
    return rated.time_s
