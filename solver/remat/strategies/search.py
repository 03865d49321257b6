"""The search that the MILP strategies share: quick outs, incumbents, solves, verification.

For a cost: keep everything if that fits; else begin from the best cheap schedule that fits, or,
where none does, from a small peak found by the same program with the peak as its objective. Slot
sets come in levels, from narrow to wide; a level is left when it has no schedule within the
budget. Every schedule that comes back was simulated in integers and fits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from remat.budget import format_bytes
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.graph import Graph
from remat.milp import backends, model
from remat.milp.backends import Answer, Outcome
from remat.milp.incumbent import Rated, best_within, candidates, polish, prune
from remat.milp.slots import Slots
from remat.progress import Cancel, Progress, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import measure, simulate
from remat.strategies.base import Solution, Stats

Level = Callable[[Schedule | None], Slots]
"""Builds a slot set that can express the given schedule, if any (complete ones always can)."""

_PEAK_SHARE = 0.4
_PEAK_GAP = 0.002
_TIGHTENINGS = 5


class Options(Protocol):
    """The options of a MILP strategy."""

    @property
    def name(self) -> str: ...
    @property
    def gap(self) -> float: ...
    @property
    def time_limit(self) -> float: ...
    @property
    def threads(self) -> int: ...
    @property
    def solver(self) -> str: ...
    @property
    def seed(self) -> int: ...


class Search:
    """One search on one graph: the deadline, the best schedule so far, and the facts gathered."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        *,
        start: Schedule | None,
        progress: ProgressCallback | None,
        cancel: Cancel | None,
    ) -> None:
        self.graph = graph
        self.options = options
        self.start = start
        self.progress = progress
        self.cancel = cancel
        self.began = time.monotonic()
        self.deadline = self.began + options.time_limit
        self.stats: Stats = {"solver": options.solver, "slots": 0, "rows": 0, "columns": 0}
        self.baseline_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes

    def least_cost(self, levels: Sequence[Level], budget_bytes: int) -> Solution:
        """The cheapest schedule within the budget, over the first level that has one."""
        if self.baseline_bytes <= budget_bytes:
            bound = self.graph.total_cost_s
            return Solution(Schedule.keep_all(self.graph), bound, "order", True, self.stats)
        cheap = self._cheap()
        incumbent = best_within(self.graph, budget_bytes, cheap)
        smallest = min(cheap, key=_by_peak).schedule
        self._clock("heuristics_s", self.began)
        for level in levels:
            if incumbent is None:
                smallest, excluded = self._reach(level, smallest, budget_bytes)
                if excluded:
                    continue
                if self._peak(smallest) <= budget_bytes:
                    incumbent = smallest
            slots = level(incumbent)
            answer, bound = self._solve_cost(slots, budget_bytes, incumbent)
            if answer.schedule is not None:
                return self._solution(slots, answer, bound)
            if answer.outcome is not Outcome.INFEASIBLE:
                self._give_up(budget_bytes, incumbent)
        assert incumbent is None
        smallest_bytes = self._peak(smallest)
        raise infeasible(
            self.graph, budget_bytes, smallest_bytes, "no schedule was found that fits"
        )

    def least_peak(self, levels: Sequence[Level]) -> Solution:
        """A schedule with the smallest peak over the widest level that the time allows."""
        best = min(self._cheap(), key=_by_peak).schedule
        solution = Solution(best, stats=self.stats)
        for number, level in enumerate(levels):
            share = (self.deadline - time.monotonic()) / (len(levels) - number)
            slots = level(best)
            answer, bound = self._solve_peak(slots, best, share)
            if answer.schedule is not None and self._peak(answer.schedule) <= self._peak(best):
                best = answer.schedule
            solution = Solution(
                best,
                bound,
                "order" if slots.complete else "slots",
                answer.outcome is Outcome.OPTIMAL,
                self.stats,
            )
            if self._cancelled():
                break
        return solution

    def _cheap(self) -> list[Rated]:
        known = [Rated.of(self.graph, self.start)] if self.start is not None else []
        return known + candidates(self.graph)

    def _reach(self, level: Level, smallest: Schedule, budget_bytes: int) -> tuple[Schedule, bool]:
        """A schedule with a peak within the budget or as near as it gets, over this level; and
        whether the level is proved to have none within."""
        left = (self.deadline - time.monotonic()) * _PEAK_SHARE
        slots = level(smallest)
        answer, bound = self._solve_peak(slots, smallest, left, budget_bytes)
        if answer.schedule is not None and self._peak(answer.schedule) < self._peak(smallest):
            smallest = answer.schedule
        return smallest, bound is not None and bound > budget_bytes * (1 + 1e-6)

    def _solve_cost(
        self, slots: Slots, budget_bytes: int, incumbent: Schedule | None
    ) -> tuple[Answer, float | None]:
        """The program's answer, verified; and the bound on total time that it proves."""
        bound: float | None = None
        budget_now = budget_bytes
        for attempt in range(_TIGHTENINGS):
            program = self._build(slots, budget_now)
            answer = self._run(
                program,
                gap=self.options.gap,
                time_limit=self.deadline - time.monotonic(),
                incumbent=incumbent,
                report=self._cost_report(program.cost_unit_s),
            )
            if attempt == 0 and answer.bound is not None:
                bound = answer.bound * program.cost_unit_s
            if answer.schedule is None:
                break
            schedule = prune(self.graph, answer.schedule)
            excess = self._peak(schedule) - budget_bytes
            if excess <= 0:
                deadline = min(self.deadline, time.monotonic() + 0.5)
                polished = polish(self.graph, schedule, budget_bytes, deadline)
                return replace(answer, schedule=polished), bound
            # The solver's tolerance let a row slip by this much; ask for that much less.
            budget_now -= excess
        if incumbent is not None:
            return Answer(Outcome.FEASIBLE, incumbent, None, None, 0, 0.0, "incumbent kept"), bound
        if answer.schedule is not None:
            return replace(answer, outcome=Outcome.UNKNOWN, schedule=None), bound
        return answer, bound

    def _solve_peak(
        self, slots: Slots, incumbent: Schedule, time_limit: float, target_bytes: int | None = None
    ) -> tuple[Answer, float | None]:
        """The program's answer, and the bound on the peak in bytes that it proves."""
        program = self._build(slots, None)
        constant, unit = self.graph.constant_bytes, program.unit_bytes
        target = None if target_bytes is None else (target_bytes - constant) / unit
        excluded = threading.Event()
        report = self._peak_report(constant, unit)

        def watch(incumbent: float | None, bound: float | None) -> None:
            report(incumbent, bound)
            if target is not None and bound is not None and bound > target * (1 + 1e-6):
                excluded.set()

        answer = self._run(
            program,
            gap=max(self.options.gap, _PEAK_GAP) if target is not None else self.options.gap,
            time_limit=time_limit,
            incumbent=incumbent,
            target=target,
            report=watch,
            done=excluded.is_set,
        )
        if answer.schedule is not None:
            answer = replace(answer, schedule=prune(self.graph, answer.schedule))
        bound = None if answer.bound is None else answer.bound * unit + constant
        return answer, bound

    def _build(self, slots: Slots, budget_bytes: int | None) -> model.Model:
        began = time.monotonic()
        program = model.build(self.graph, slots, budget_bytes)
        self._clock("model_s", began)
        self.stats["slots"] = slots.optional_count
        self.stats["rows"] = program.rows
        self.stats["columns"] = program.columns
        return program

    def _run(
        self,
        program: model.Model,
        *,
        gap: float,
        time_limit: float,
        incumbent: Schedule | None,
        report: Callable[[float | None, float | None], None],
        target: float | None = None,
        done: Callable[[], bool] | None = None,
    ) -> Answer:
        stops = [f for f in (self.cancel and self.cancel.is_set, done) if f is not None]
        answer = backends.run(
            program,
            solver=self.options.solver,
            gap=gap,
            time_limit=max(0.1, time_limit),
            threads=self.options.threads,
            seed=self.options.seed,
            incumbent=incumbent,
            target=target,
            report=report if self.progress is not None or done is not None else None,
            cancelled=(lambda: any(stop() for stop in stops)) if stops else None,
        )
        self.stats["solver_s"] = float(self.stats.get("solver_s", 0.0)) + answer.seconds
        self.stats["nodes"] = answer.nodes
        self.stats["solver_message"] = answer.message
        return answer

    def _solution(self, slots: Slots, answer: Answer, bound: float | None) -> Solution:
        assert answer.schedule is not None
        scope = "order" if slots.complete else "slots"
        if bound is not None:
            bound = max(bound, self.graph.total_cost_s)
        proved = answer.outcome is Outcome.OPTIMAL
        if bound is not None:
            cost = simulate(self.graph, answer.schedule).time_s
            proved = proved or cost - bound <= self.options.gap * cost
        return Solution(answer.schedule, bound, scope, proved, self.stats)

    def _give_up(self, budget_bytes: int, incumbent: Schedule | None) -> None:
        if self._cancelled():
            raise RematError("the solve was cancelled before any schedule was known")
        raise SolverTimeout(
            f"no schedule within {format_bytes(budget_bytes)} was found in "
            f"{self.options.time_limit:g} s, and none was excluded; raise `time_limit` or the budget"
        )

    def _cost_report(self, unit_s: float) -> Callable[[float | None, float | None], None]:
        total = self.graph.total_cost_s or 1.0
        return self._reporter("cost", lambda x: x * unit_s / total - 1, lambda x: x * unit_s)

    def _peak_report(
        self, constant: int, unit: int
    ) -> Callable[[float | None, float | None], None]:
        return self._reporter("peak", lambda x: x * unit + constant, lambda x: x * unit + constant)

    def _reporter(
        self, phase: str, shown: Callable[[float], float], whole: Callable[[float], float]
    ) -> Callable[[float | None, float | None], None]:
        def report(incumbent: float | None, bound: float | None) -> None:
            if self.progress is None:
                return
            gap = None
            if incumbent is not None and bound is not None and whole(incumbent) > 0:
                gap = max(0.0, (whole(incumbent) - whole(bound)) / whole(incumbent))
            self.progress(
                Progress(
                    phase=phase,
                    elapsed_s=time.monotonic() - self.began,
                    incumbent=None if incumbent is None else shown(incumbent),
                    bound=None if bound is None else shown(bound),
                    gap=gap,
                )
            )

        return report

    def _peak(self, schedule: Schedule) -> int:
        return measure(self.graph, schedule)[0]

    def _cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()

    def _clock(self, phase: str, began: float) -> None:
        self.stats[phase] = float(self.stats.get(phase, 0.0)) + time.monotonic() - began


def infeasible(
    graph: Graph, budget_bytes: int, smallest_bytes: int, reason: str
) -> InfeasibleBudget:
    """The error for a budget that no known schedule fits."""
    baseline_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget_bytes)} ({budget_bytes:,} bytes) is too small: {reason}; "
        f"the smallest peak found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes), "
        f"without recomputation it is {format_bytes(baseline_bytes)} "
        f"({baseline_bytes:,} bytes). Pass a budget of at least {smallest_bytes:,} bytes "
        f"or budget='min', or make the batch smaller.",
        min_feasible_bytes=smallest_bytes,
    )


def _by_peak(rated: Rated) -> tuple[int, float]:
    return rated.peak_bytes, rated.time_s
