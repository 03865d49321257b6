"""Schedules within a budget by annealing over whole sequences: order and recomputation together, or
recomputation only.

Rounds of `anneal`, some from the start's order without recomputation, some from the best schedule
so far. Where none of the first rounds fits, eviction (`local_search`) gets the order that came
nearest, and its schedule goes to the rounds that follow. Where first runs keep the graph's order,
moves aim at the slots where memory is over the budget: few others change it.

Limits: at budgets where much of the graph runs twice, moving one run at a time rarely gets
anywhere; rounds do not learn temperature and price from each other; and where one order is nearly
forced, as in training graphs, the MILP over that order does as well or better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from remat.graph import Graph
from remat.heuristics.annealing.moves import (
    CoolingSchedule,
    Move,
    add_recomputation,
    anneal,
    evict_over_budget,
    exchange_recomputations,
    mix_of_moves,
    move_neighbouring_runs,
    relocate_run,
    remove_recomputation,
    shift_repeated_run,
    swap_recomputation,
    transpose_runs,
)
from remat.heuristics.annealing.orders import (
    first_run_order,
    reorder_graph,
    with_fixed_order,
    with_order_constraints,
)
from remat.heuristics.annealing.schedule_profile import ScheduleProfile
from remat.heuristics.local_search import (
    EvaluatedSchedule,
    schedules_within_budget,
    smallest_peak_schedule,
)
from remat.heuristics.polish import prune
from remat.schedule import Schedule

_ORDER_MIX = mix_of_moves(
    (relocate_run, 11),
    (transpose_runs, 1),
    (move_neighbouring_runs, 2),
    (add_recomputation, 2),
    (remove_recomputation, 3),
    (exchange_recomputations, 1),
)
_RECOMPUTATION_MIX = mix_of_moves(
    (shift_repeated_run, 4),
    (add_recomputation, 1),
    (remove_recomputation, 4),
    (exchange_recomputations, 1),
    (evict_over_budget, 2),
    (swap_recomputation, 8),
)
_MIN_GAIN = 1e-9
_EVICTION_RUN_FACTOR = 8
"""Operations that eviction may run, in multiples of the graph's."""


@dataclass(frozen=True, slots=True)
class _AnnealingRound:
    """One round of annealing, with its share of the moves.

    With `from_order` it starts from the order of first runs without recomputation; otherwise from
    the best schedule or, if nothing fits, from the sequence with the least excess. With
    `only_if_infeasible` it is skipped once something fits.
    """

    cooling: CoolingSchedule
    effort_share: float
    from_order: bool = False
    only_if_infeasible: bool = False


_HOT = CoolingSchedule(start_temperature=1.2, end_temperature=0.05, start_price=1.0, end_price=25.0)
_COOL = CoolingSchedule(
    start_temperature=0.3, end_temperature=0.03, start_price=8.0, end_price=25.0
)
_LOW_PRICE = CoolingSchedule(
    start_temperature=0.3, end_temperature=0.04, start_price=0.02, end_price=10.0
)
_HIGH_PRICE = CoolingSchedule(
    start_temperature=0.3, end_temperature=0.05, start_price=10.0, end_price=100.0
)
_FIRST_ROUNDS = (
    _AnnealingRound(_COOL, 0.05),
    _AnnealingRound(_HOT, 0.4, from_order=True),
    _AnnealingRound(_HIGH_PRICE, 0.1, only_if_infeasible=True),
)
_LATER_ROUNDS = (_AnnealingRound(_HOT, 0.25), _AnnealingRound(_COOL, 0.2))
# In a fixed order, excess must be cheap at first: evicting one value over a long stretch in favour
# of another leads through sequences that are over the budget at hundreds of runs.
_FIXED_ORDER_ROUNDS = (
    _AnnealingRound(_LOW_PRICE, 0.35, from_order=True),
    _AnnealingRound(_HIGH_PRICE, 0.1, only_if_infeasible=True),
    _AnnealingRound(_LOW_PRICE, 0.3, from_order=True),
    _AnnealingRound(_HIGH_PRICE, 0.1, only_if_infeasible=True),
    _AnnealingRound(_LOW_PRICE, 0.25),
)


def anneal_schedule(
    graph: Graph,
    budget_bytes: int,
    start: Schedule,
    *,
    max_moves: int = 600_000,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Return the cheapest schedule found with a peak of at most `budget_bytes`, constant memory
    included.

    It is never worse than `start`: if nothing that fits is found, it is the one with the smallest
    peak. Operations run in any order that `with_order_constraints` allows; raises `GraphError` if
    `start` does not.
    """
    search = _AnnealingSearch(
        with_order_constraints(graph), _ORDER_MIX, budget_bytes, start, seed, stop
    )
    for annealing_round in _FIRST_ROUNDS:
        search.anneal(annealing_round, round(max_moves * annealing_round.effort_share))
    search.evict()
    for annealing_round in _LATER_ROUNDS:
        search.anneal(annealing_round, round(max_moves * annealing_round.effort_share))
    return search.best.schedule


def anneal_recomputations(
    graph: Graph,
    budget_bytes: int,
    start: Schedule,
    *,
    max_moves: int = 600_000,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Return a schedule like `anneal_schedule`, where first runs keep the graph's order; `start`
    must do so, too."""
    search = _AnnealingSearch(
        with_fixed_order(graph), _RECOMPUTATION_MIX, budget_bytes, start, seed, stop
    )
    for annealing_round in _FIXED_ORDER_ROUNDS:
        search.anneal(annealing_round, round(max_moves * annealing_round.effort_share))
    return search.best.schedule


class _AnnealingSearch:
    """The rounds of one search. Every topological order of `graph` must be allowed."""

    def __init__(
        self,
        graph: Graph,
        mix: list[Move],
        budget_bytes: int,
        start: Schedule,
        seed: int,
        stop: Callable[[], bool],
    ) -> None:
        self.graph = graph
        self.mix = mix
        self.budget_bytes = budget_bytes
        start.check(self.graph)
        self.start = start
        self.random = Random(seed)
        self.stop = stop
        self.best = EvaluatedSchedule.of(self.graph, start)
        self.least_excess_runs = start.runs
        self.excess_bytes = float("inf")

    def is_optimal(self) -> bool:
        """True if the best schedule fits without recomputation: none is cheaper."""
        return self._fits(self.best) and len(self.best.schedule) == len(self.graph)

    def anneal(self, annealing_round: _AnnealingRound, max_moves: int) -> None:
        """Run one round, and update the best schedule. Does nothing if the best is optimal, if the
        round is `only_if_infeasible` and something fits, or if `stop` returns True."""
        has_fit = self._fits(self.best)
        if self.is_optimal() or self.stop() or (annealing_round.only_if_infeasible and has_fit):
            return
        runs = self.best.schedule.runs if has_fit else self.least_excess_runs
        if annealing_round.from_order:
            runs = first_run_order(self.start)
        profile = ScheduleProfile(self.graph, self.budget_bytes, runs)
        best_runs: list[int] = []
        best_time_s = self.best.time_s if has_fit else float("inf")

        def record(profile: ScheduleProfile) -> bool:
            nonlocal best_runs, best_time_s
            if profile.time_s < best_time_s * (1 - _MIN_GAIN):
                best_runs, best_time_s = profile.runs, profile.time_s
            return len(best_runs) == len(self.graph)

        anneal(
            profile,
            self.random,
            annealing_round.cooling,
            self.mix,
            max_moves=max_moves,
            on_fit=record,
            stop=self.stop,
        )
        if profile.excess_bytes < self.excess_bytes:
            self.least_excess_runs, self.excess_bytes = tuple(profile.runs), profile.excess_bytes
        self._accept_if_better(Schedule.of(best_runs or profile.runs))

    def evict(self) -> None:
        """Run eviction in the order that came nearest to the budget, and update the best schedule.
        Does nothing if something fits already, or if `stop` returns True."""
        if self._fits(self.best) or self.stop():
            return
        permuted, to_original = reorder_graph(
            self.graph, first_run_order(Schedule.of(self.least_excess_runs))
        )
        max_runs = _EVICTION_RUN_FACTOR * len(self.graph)
        candidates = schedules_within_budget(
            permuted, self.budget_bytes, max_runs=max_runs, stop=self.stop
        )
        if not candidates:
            candidates = [
                smallest_peak_schedule(
                    permuted, target_bytes=self.budget_bytes, max_runs=max_runs, stop=self.stop
                )
            ]
        self._accept_if_better(to_original(candidates[0].schedule))

    def _accept_if_better(self, schedule: Schedule) -> None:
        """Make the pruned schedule the best one if it ranks before it."""
        evaluated = EvaluatedSchedule.of(self.graph, prune(self.graph, schedule))
        self.best = min(self.best, evaluated, key=self._rank)

    def _fits(self, evaluated: EvaluatedSchedule) -> bool:
        """True if the peak of a schedule is within the budget."""
        return evaluated.peak_bytes <= self.budget_bytes

    def _rank(self, evaluated: EvaluatedSchedule) -> tuple[int, float, int]:
        """Return the sort key of a schedule, the smallest the best: what fits, then the fastest."""
        return max(evaluated.peak_bytes, self.budget_bytes), evaluated.time_s, evaluated.peak_bytes
