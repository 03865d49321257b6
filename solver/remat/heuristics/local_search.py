"""Schedules from many attempts of eviction: to start a solver from, and to fall back on when it
finds none in time.

The attempts follow the advice of `remat.milp.retention_advice` if there is any, then each rule of
`eviction`, then random weights around the best so far: a plain local search that evaluates
schedules by simulation. `polish` then removes needless recomputations.

Nothing here looks at a clock: work is counted in operations run or simulated, so the same call
returns the same schedule on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.graph import Graph
from remat.heuristics.eviction import EVICTION_RULES, EvictionAdvice, EvictionRule, evict
from remat.heuristics.polish import polish, prune
from remat.schedule import Schedule
from remat.simulate import peak_and_time

_MIN_RUNS, _RUNS_PER_OPERATION = 10_000, 60
_RUNS_PER_PAIR = 40

_MAX_SCHEDULES = 12
"""Schedules that are returned at most."""

ADVICE_RULES = (EvictionRule(), EvictionRule(cost_exponent=2.0), EvictionRule(idle_exponent=0.6))
"""The rules that work best with advice."""

MIN_ATTEMPTS = 3
"""Attempts that are made even if `stop` returns True, as long as nothing fits."""

_WEIGHT_SPREADS = (0.2, 0.5, 1.0)
_PEAK_STEP = 0.001

_TIME_ALLOWANCE = 0.1
"""Share of the best extra time by which an attempt may exceed it, for pruning to win back."""


class EvaluatedSchedule(NamedTuple):
    """A schedule with its simulated peak and time."""

    peak_bytes: int
    time_s: float
    schedule: Schedule

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> EvaluatedSchedule:
        """Simulate the schedule."""
        return cls(*peak_and_time(graph, schedule), schedule)


def smallest_peak_schedule(
    graph: Graph,
    *,
    target_bytes: int,
    start: Schedule | None = None,
    max_runs: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> EvaluatedSchedule:
    """Return the schedule with the smallest peak that many attempts of eviction find.

    Ends at the first peak of at most `target_bytes` (a budget, or a lower bound), after `max_runs`
    operations, or when `stop` returns True. `start` is a schedule to improve on.
    """
    best = EvaluatedSchedule.of(graph, Schedule.keep_all(graph))
    if start is not None:
        best = min(
            best, EvaluatedSchedule.of(graph, start), key=lambda candidate: candidate.peak_bytes
        )
    max_runs = run_limit(graph) if max_runs is None else max_runs
    proposals = _EvictionProposals(graph)
    for attempt_number, (rule, weights, _) in enumerate(proposals):
        # First slightly less than the best peak (except for the first rule), then the target, then
        # bisection.
        low_bytes, attempt = target_bytes - 1, int(attempt_number == 0)
        while best.peak_bytes > target_bytes:
            step_bytes = max(1, int(best.peak_bytes * _PEAK_STEP))
            if attempt and best.peak_bytes - low_bytes <= step_bytes:
                break
            if max_runs <= 0 or stop():
                return best
            trial_bytes = (
                best.peak_bytes - step_bytes,
                target_bytes,
                (low_bytes + best.peak_bytes) // 2,
            )
            budget_bytes = max(target_bytes, trial_bytes[min(attempt, 2)])
            schedule = evict(graph, budget_bytes, rule, weights, stop=stop)
            max_runs -= len(graph) if schedule is None else len(schedule)
            attempt += 1
            if schedule is not None:
                best = EvaluatedSchedule.of(graph, prune(graph, schedule))
                proposals.accept()
            elif attempt == 1 and attempt_number:
                break
            else:
                low_bytes = budget_bytes
        if best.peak_bytes <= target_bytes:
            break
    return best


def schedules_within_budget(
    graph: Graph,
    budget_bytes: int,
    *,
    incumbents: Sequence[Schedule] = (),
    advice: Iterable[EvictionAdvice] = (),
    rules: Sequence[EvictionRule] = ADVICE_RULES,
    is_good_enough: Callable[[float], bool] = lambda _: False,
    max_runs: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    must_stop: Callable[[], bool] = lambda: False,
) -> list[EvaluatedSchedule]:
    """Return schedules with a peak of at most `budget_bytes`, polished, the cheapest first.

    `incumbents` are schedules to return too if they are among the best. `advice` is tried first,
    each piece under these `rules`. `is_good_enough` returns True for a time in seconds that need
    not be improved. `stop` is called once there is something to return, or after `MIN_ATTEMPTS`
    attempts; before that, `must_stop` is.
    """
    evaluated = {schedule: EvaluatedSchedule.of(graph, schedule) for schedule in incumbents}
    evaluated = {
        s: candidate for s, candidate in evaluated.items() if candidate.peak_bytes <= budget_bytes
    }
    best_time_s = min((candidate.time_s for candidate in evaluated.values()), default=float("inf"))
    max_runs = run_limit(graph) if max_runs is None else max_runs
    proposals = _EvictionProposals(graph, advice, rules)
    for attempt_number, (rule, weights, advice_item) in enumerate(proposals):
        stop_now = stop if evaluated or attempt_number >= MIN_ATTEMPTS else must_stop
        if is_good_enough(best_time_s) or max_runs <= 0 or stop_now():
            break
        max_time_s = best_time_s + _TIME_ALLOWANCE * (best_time_s - graph.total_cost_s)
        schedule = evict(graph, budget_bytes, rule, weights, advice_item, max_time_s, stop_now)
        max_runs -= len(graph) if schedule is None else len(schedule)
        if schedule is None:
            continue
        schedule = polish(graph, schedule, budget_bytes)
        candidate = evaluated[schedule] = EvaluatedSchedule.of(graph, schedule)
        if candidate.time_s < best_time_s:
            best_time_s = candidate.time_s
            proposals.accept()
    return heapq.nsmallest(_MAX_SCHEDULES, evaluated.values(), key=_time_and_peak)


Proposal = tuple[EvictionRule, list[float] | None, EvictionAdvice]
"""The rule, weights and advice of one attempt."""


class _EvictionProposals:
    """Iterates over the attempts of eviction to make.

    First the first rule; then all advice, and for each piece as many attempts without it; these are
    the other rules, and then random weights around the proposal that was last accepted. Those go on
    for ever.
    """

    def __init__(
        self,
        graph: Graph,
        advice: Iterable[EvictionAdvice] = (),
        rules: Sequence[EvictionRule] = ADVICE_RULES,
    ) -> None:
        self._advice = advice
        self._rules = rules
        self._random = np.random.default_rng(0)
        self._ones = np.ones(len(graph.values))
        self._accepted: tuple[EvictionRule, NDArray[np.float64], EvictionAdvice] = (
            EVICTION_RULES[0],
            self._ones,
            (),
        )
        self._latest = self._accepted

    def __iter__(self) -> Iterator[Proposal]:
        without_advice = self._proposals_without_advice()
        yield next(without_advice)
        for advice_item in self._advice:
            for rule in self._rules:
                yield self._unweighted_proposal(rule, advice_item)
            # Advice may be bad: make as many attempts without it.
            yield from islice(without_advice, len(self._rules))
        yield from without_advice

    def _proposals_without_advice(self) -> Iterator[Proposal]:
        """Yield each rule, then random weights around the accepted proposal, without end."""
        for rule in EVICTION_RULES:
            yield self._unweighted_proposal(rule, ())
        attempt_number = 0
        while True:
            rule, weights, advice_item = self._accepted
            spread = _WEIGHT_SPREADS[attempt_number % len(_WEIGHT_SPREADS)]
            weights = weights * np.exp(self._random.normal(0.0, spread, len(weights)))
            self._latest = (rule, weights, advice_item)
            attempt_number += 1
            yield rule, weights.tolist(), advice_item

    def _unweighted_proposal(self, rule: EvictionRule, advice_item: EvictionAdvice) -> Proposal:
        """Return a proposal without weights, and remember it as the latest."""
        self._latest = (rule, self._ones, advice_item)
        return rule, None, advice_item

    def accept(self) -> None:
        """Accept the last proposal as an improvement, and continue around it."""
        self._accepted = self._latest


def run_limit(
    graph: Graph, per_operation: int = _RUNS_PER_OPERATION, min_runs: int = _MIN_RUNS
) -> int:
    """Return the number of operations that one search may run, all attempts together: `min_runs`,
    or a multiple of the graph's if that is more. Graphs of a dozen operations have a limit per pair
    of operations, because attempts soon repeat themselves."""
    count = len(graph)
    return max(per_operation * count, min(min_runs, _RUNS_PER_PAIR * count**2))


def _time_and_peak(candidate: EvaluatedSchedule) -> tuple[float, int]:
    """Return the sort key of a schedule, the smallest the best."""
    return candidate.time_s, candidate.peak_bytes
