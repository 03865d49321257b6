"""Schedules without a solver: to start one from, and to fall back on when it finds none in time.

Every schedule comes from `eviction`: first under the advice of `remat.milp.advice` where
there is any, then under each of its rules, then under random weights around the best so far, a
plain local search with the simulator as its judge. `polish` then takes back what turns out not to
be needed.

Nothing here looks at a clock: work is counted in operations run or simulated, so the same call
gives the same schedule on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.graph import Graph
from remat.heuristics.eviction import RULES, Advice, Rule, evict
from remat.heuristics.polish import polish, prune
from remat.schedule import Schedule
from remat.simulate import peak_and_time

EFFORT = 10_000
ATTEMPTS = 60
EFFORT_PER_PAIR = 40
"""Operations that one search may run, all attempts together: `EFFORT`, or `ATTEMPTS` times the
graph's if that is more; on graphs of a dozen operations less, where attempts soon repeat
themselves."""

_MOST = 12
"""Schedules that are returned."""

ADVISED = (Rule(), Rule(cost=2.0), Rule(idle=0.6))
"""The rules that take advice best."""

AT_LEAST = 3
"""Attempts that are made whatever `stop` says, where nothing fits yet."""

_SPREADS = (0.2, 0.5, 1.0)
_STEP = 0.001

_SPARE = 0.1
"""Of the best extra time: how much more an attempt may take, for pruning to win it back."""


def _never() -> bool:
    return False


def _not_yet(_: float) -> bool:
    return False


class Rated(NamedTuple):
    """A schedule with its peak and time."""

    peak_bytes: int
    time_s: float
    schedule: Schedule

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> Rated:
        """Simulated."""
        return cls(*peak_and_time(graph, schedule), schedule)


def smallest(
    graph: Graph,
    *,
    target_bytes: int,
    start: Schedule | None = None,
    effort: int | None = None,
    stop: Callable[[], bool] = _never,
) -> Rated:
    """The schedule with the smallest peak that the search finds.

    Ends at the first peak of at most `target_bytes`: a budget, or a bound that no peak is under.
    `start` is a schedule to improve on.
    """
    best = Rated.of(graph, Schedule.keep_all(graph))
    if start is not None:
        best = min(best, Rated.of(graph, start), key=lambda rated: rated.peak_bytes)
    effort = _effort(graph) if effort is None else effort
    proposals = _Proposals(graph)
    for turn, (rule, weights, _) in enumerate(proposals):
        # A little less than now (but for the first rule); all there is to win; then halves.
        low, attempt = target_bytes - 1, int(turn == 0)
        while best.peak_bytes > target_bytes:
            step = max(1, int(best.peak_bytes * _STEP))
            if attempt and best.peak_bytes - low <= step:
                break
            if effort <= 0 or stop():
                return best
            aim = (best.peak_bytes - step, target_bytes, (low + best.peak_bytes) // 2)
            budget = max(target_bytes, aim[min(attempt, 2)])
            schedule = evict(graph, budget, rule, weights, stop=stop)
            effort -= len(graph) if schedule is None else len(schedule)
            attempt += 1
            if schedule is not None:
                best = Rated.of(graph, prune(graph, schedule))
                proposals.accept()
            elif attempt == 1 and turn:
                break
            else:
                low = budget
        if best.peak_bytes <= target_bytes:
            break
    return best


def fitting(
    graph: Graph,
    budget_bytes: int,
    *,
    known: Sequence[Schedule] = (),
    advice: Iterable[Advice] = (),
    rules: Sequence[Rule] = ADVISED,
    enough: Callable[[float], bool] = _not_yet,
    effort: int | None = None,
    stop: Callable[[], bool] = _never,
) -> list[Rated]:
    """Schedules with a peak of at most `budget_bytes`, polished, the cheapest first.

    `known` are schedules to be judged with those that the search finds, `advice` is tried first,
    each piece under these `rules`, `enough` says of a time in seconds that no better one is wanted.
    `stop` is heeded once there is something to return, or after `AT_LEAST` attempts.
    """
    found = {schedule: Rated.of(graph, schedule) for schedule in known}
    found = {s: rated for s, rated in found.items() if rated.peak_bytes <= budget_bytes}
    best_s = min((rated.time_s for rated in found.values()), default=float("inf"))
    effort = _effort(graph) if effort is None else effort
    proposals = _Proposals(graph, advice, rules)
    for turn, (rule, weights, piece) in enumerate(proposals):
        heeded = stop if found or turn >= AT_LEAST else _never
        if enough(best_s) or effort <= 0 or heeded():
            break
        most_s = best_s + _SPARE * (best_s - graph.total_cost_s)
        schedule = evict(graph, budget_bytes, rule, weights, piece, most_s, heeded)
        effort -= len(graph) if schedule is None else len(schedule)
        if schedule is None:
            continue
        schedule = polish(graph, schedule, budget_bytes)
        rated = found[schedule] = Rated.of(graph, schedule)
        if rated.time_s < best_s:
            best_s = rated.time_s
            proposals.accept()
    return heapq.nsmallest(_MOST, found.values(), key=_by_cost)


Proposal = tuple[Rule, list[float] | None, Advice]


class _Proposals:
    """The first rule; all advice, and as often the other rules and then random weights around what
    was last accepted; and these until the end."""

    def __init__(
        self, graph: Graph, advice: Iterable[Advice] = (), rules: Sequence[Rule] = ADVISED
    ) -> None:
        self._advice = advice
        self._rules = rules
        self._random = np.random.default_rng(0)
        self._ones = np.ones(len(graph.values))
        self._centre: tuple[Rule, NDArray[np.float64], Advice] = (RULES[0], self._ones, ())
        self._last = self._centre

    def __iter__(self) -> Iterator[Proposal]:
        unadvised = self._unadvised()
        yield next(unadvised)
        for piece in self._advice:
            for rule in self._rules:
                yield self._of(rule, piece)
            # Advice may be bad: as many without it.
            yield from islice(unadvised, len(self._rules))
        yield from unadvised

    def _unadvised(self) -> Iterator[Proposal]:
        for rule in RULES:
            yield self._of(rule, ())
        turn = 0
        while True:
            rule, weights, piece = self._centre
            spread = _SPREADS[turn % len(_SPREADS)]
            weights = weights * np.exp(self._random.normal(0.0, spread, len(weights)))
            self._last = (rule, weights, piece)
            turn += 1
            yield rule, weights.tolist(), piece

    def _of(self, rule: Rule, piece: Advice) -> Proposal:
        self._last = (rule, self._ones, piece)
        return rule, None, piece

    def accept(self) -> None:
        """The last proposal was an improvement."""
        self._centre = self._last


def _effort(graph: Graph) -> int:
    count = len(graph)
    return max(ATTEMPTS * count, min(EFFORT, EFFORT_PER_PAIR * count**2))


def _by_cost(rated: Rated) -> tuple[float, int]:
    return rated.time_s, rated.peak_bytes
