"""`SearchState`: incumbents, lower bound and statistics, passed from step to step of a search."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from remat.errors import GraphError
from remat.graph import Graph
from remat.heuristics.local_search import EvaluatedSchedule
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.heuristics.polish import polish, prune
from remat.milp.backends import SolverOutcome
from remat.milp.retention_advice import RetentionAdvisor
from remat.milp.slots import Slots
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.base import Task
from remat.strategies.option_types import MilpOptions
from remat.strategies.search.runner import MilpRunner

SlotBuilder = Callable[[Graph, Sequence[Schedule], float, int], Slots]
"""Function (graph, schedules, affordable_s, coarseness) that returns the slots of a program.

The slots can express the first of the schedules and include the recomputations of the others
(complete slots always do). Operations that cost more than `affordable_s` seconds get none. A
coarseness above 1 gives fewer slots.
"""

USABLE_SHARE = 0.96
"""Share of the time limit that a search plans for. Parts of a solver's presolve cannot be
interrupted and overrun the deadline."""

_UNLIMITED_BYTES = 1 << 62

_MAX_INCUMBENTS = 12


class SlotProgramResult(NamedTuple):
    """Outcome of the program over slots, the bound on the objective that it proves, and whether
    its slots can express every schedule of the order."""

    outcome: SolverOutcome
    bound: float | None
    is_complete: bool


class SearchState:
    """The incumbents and the bound of one search: for the least time within a budget or, without
    a budget, for the smallest peak.

    The objective is the total time in the graph's unit or, without a budget, the peak in bytes.
    Steps add schedules with `add_schedules`: each is polished, simulated, and becomes an incumbent
    if it fits and is among the best. Steps work on `graph` within `budget_bytes`. Those are the
    task's, or a graph without small values and a budget reduced by their bytes (`switch_graph`).
    With `target_bytes`, a peak of at most that is small enough.
    """

    def __init__(
        self,
        task: Task,
        options: MilpOptions,
        build_slots: SlotBuilder,
        *,
        small_values_share: float = 0.0,
        target_bytes: int | None = None,
        runner: MilpRunner | None = None,
    ) -> None:
        self.task = task
        self.graph = task.graph
        self.budget_bytes = _UNLIMITED_BYTES if task.budget_bytes is None else task.budget_bytes
        self.options = options
        self.small_values_share = small_values_share
        """Share of the memory for activations that may be reserved for small values, which are then
        always retained: see `remat.strategies.search.eviction`."""
        self.target_bytes = target_bytes
        clock = Clock.of(USABLE_SHARE * options.time_limit, task.cancel)
        self.runner = runner or MilpRunner(task.graph, options, clock, task.progress)
        self.clock, self.stats = self.runner.clock, self.runner.stats
        self.peak_lower_bound_bytes = peak_lower_bound_bytes(task.graph)
        self.advisor: RetentionAdvisor | None = None
        self.slot_result: SlotProgramResult | None = None
        self.incumbents: list[EvaluatedSchedule] = []
        """The best schedules within the budget, best first."""
        self._build_slots = build_slots
        self._lock = threading.Lock()
        self._full_graph_candidates: list[EvaluatedSchedule] = []
        start = task.start
        # Bounds are for the graph's order: a schedule in another order could be below them.
        self.start = start if start is not None and start.keeps_order() else None
        self.add_schedules(() if self.start is None else (self.start,))

    # -- schedules

    def add_schedules(self, schedules: Iterable[Schedule]) -> None:
        """Polish and simulate the schedules, and make those that fit and are among the best
        incumbents. Thread-safe."""
        for schedule in schedules:
            if self.graph.no_recompute_spans and not _is_valid_schedule(self.graph, schedule):
                continue
            evaluated = self._polish(self.graph, schedule, self.budget_bytes)
            if evaluated.peak_bytes <= self.budget_bytes:
                with self._lock:
                    # Of two equally good schedules, the earlier one stays first.
                    distinct = dict.fromkeys((*self.incumbents, evaluated))
                    self.incumbents = sorted(distinct, key=self.objective_of)[:_MAX_INCUMBENTS]
            elif self.graph is not self.task.graph:
                self._add_full_graph_candidate(schedule)

    def _add_full_graph_candidate(self, schedule: Schedule) -> None:
        """Remember a schedule that fits the task's budget, but not the reduced one: it may be the
        best in the end."""
        budget_bytes = self.task.budget_bytes
        if budget_bytes is not None:
            evaluated = self._polish(self.task.graph, schedule, budget_bytes)
            if evaluated.peak_bytes <= budget_bytes:
                self._full_graph_candidates.append(evaluated)

    def _polish(self, graph: Graph, schedule: Schedule, budget_bytes: int) -> EvaluatedSchedule:
        if self.is_peak_search:
            return EvaluatedSchedule.of(graph, prune(graph, schedule))
        return EvaluatedSchedule.of(graph, polish(graph, schedule, budget_bytes))

    def switch_graph(self, reduced_graph: Graph, budget_bytes: int) -> None:
        """Continue on a graph in which small values have no bytes, within a budget that is smaller
        by their bytes."""
        schedules = [incumbent.schedule for incumbent in self.incumbents]
        self.graph, self.budget_bytes, self.incumbents = reduced_graph, budget_bytes, []
        self.runner = replace(self.runner, graph=reduced_graph)
        self.add_schedules(schedules)

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules of the incumbents, best first."""
        return [incumbent.schedule for incumbent in self.incumbents]

    @property
    def candidate_schedules(self) -> list[Schedule]:
        """The incumbents' schedules, and those that the checkpoint cuts imply, which may not
        fit."""
        return [*self.schedules, *(() if self.advisor is None else self.advisor.implied_schedules)]

    @property
    def best(self) -> Schedule:
        """The schedule of the best incumbent; there must be one."""
        return self.incumbents[0].schedule

    def best_overall(self) -> tuple[Schedule, float]:
        """Return the best schedule for the task's own graph and budget, with its objective.

        That includes schedules that fit only the full budget, and values that are retained in
        memory that was reserved for small values.
        """
        if self.graph is not self.task.graph:
            self._add_full_graph_candidate(self.best)
        best = min(self.incumbents + self._full_graph_candidates, key=self.objective_of)
        return best.schedule, self.objective_of(best)

    @property
    def objective(self) -> float:
        """The objective of the best incumbent; infinity if there is none."""
        return self.objective_of(self.incumbents[0]) if self.incumbents else math.inf

    def objective_of(self, evaluated: EvaluatedSchedule) -> float:
        """Return the total time of a schedule or, in a search without a budget, its peak."""
        return evaluated.peak_bytes if self.is_peak_search else evaluated.time_s

    # -- bounds

    @property
    def is_peak_search(self) -> bool:
        """True if the search is for the smallest peak."""
        return self.task.budget_bytes is None

    @property
    def bound(self) -> float:
        """The lower bound on the objective that is proved for every schedule of the order."""
        bound = (
            float(self.peak_lower_bound_bytes) if self.is_peak_search else self.graph.total_cost_s
        )
        if self.advisor is not None:
            bound = max(bound, self.advisor.bound_s)
        result = self.slot_result
        if result is None or not result.is_complete or result.bound is None:
            return bound
        # Schedules excluded from the slots as too expensive are no better than the incumbent.
        return max(bound, min(result.bound, self.objective))

    def is_good_enough(self, objective: float, gap_share: float = 1.0) -> bool:
        """True if an objective is at most `target_bytes` or, without a target, within `gap_share`
        times the requested gap of the lower bound."""
        if self.target_bytes is not None:
            return objective <= self.target_bytes
        if self.is_peak_search:
            return objective <= self.bound * (1 + gap_share * self.options.peak_gap)
        gap = gap_share * self.options.gap
        return math.isfinite(objective) and objective - self.bound <= gap * objective

    @property
    def is_within_gap(self) -> bool:
        """True if the best incumbent is within the requested gap."""
        return self.is_good_enough(self.objective)

    # -- programs

    def candidate_slots(self, coarseness: int = 1) -> Slots:
        """Return the slots that can improve on the best incumbent; fewer with a coarseness above
        1."""
        affordable_s = math.inf if self.is_peak_search else self.objective - self.graph.total_cost_s
        return self._build_slots(self.graph, [self.best], affordable_s, coarseness)

    def peak_search_state(self, target_bytes: int | None = None) -> SearchState:
        """Return a state for finding the smallest peak, or one of at most `target_bytes`.

        It shares this search's clock, runner and statistics.
        """
        task = replace(self.task, budget_bytes=None, start=self.start)
        runner = replace(self.runner, graph=task.graph)
        return SearchState(
            task, self.options, self._build_slots, target_bytes=target_bytes, runner=runner
        )


def _is_valid_schedule(graph: Graph, schedule: Schedule) -> bool:
    """True if a schedule is valid: where operations share a copy, some must not be recomputed."""
    try:
        schedule.check(graph)
    except GraphError:
        return False
    return True
