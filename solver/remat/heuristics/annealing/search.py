"""Schedules within a budget by annealing over whole sequences: order and recomputation together,
or recomputation alone.

Rounds of `anneal`, some from the start's order with nothing run twice, some from the
best schedule so far. Where none of the first rounds fits, the order that came nearest is given to
eviction (`local_search`), and its schedule to the rounds that follow. Where first runs keep
the graph's order, moves aim at the places where memory is over the budget: few others change it.

Not yet as good as it could be: at budgets where much of the graph runs twice, one run moved at a
time rarely gets anywhere; rounds do not learn from each other how hot or how dear to be; and where
one order is nearly forced, as in training graphs, the MILP over that order does as well or better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from remat.graph import Graph
from remat.heuristics.annealing.anneal import Cooling, Mix, anneal
from remat.heuristics.annealing.moves import (
    block,
    exchange,
    relieve,
    relocate,
    repeat,
    retire,
    shift,
    swap,
    transpose,
)
from remat.heuristics.annealing.profile import Profile
from remat.heuristics.annealing.reorder import first_runs, guarded, pinned, reordered
from remat.heuristics.local_search import Rated, fitting, smallest
from remat.heuristics.polish import prune
from remat.schedule import Schedule

EFFORT = 600_000
"""Moves tried by default, all rounds together; some 40 s on one core."""

_MIX = Mix(((relocate, 11), (transpose, 1), (block, 2), (repeat, 2), (retire, 3), (exchange, 1)))
_IN_ORDER = Mix(((shift, 4), (repeat, 1), (retire, 4), (exchange, 1), (relieve, 2), (swap, 8)))
_LEAST_GAIN = 1e-9
_EVICTIONS = 8
"""Operations that eviction may run, in times the graph's."""


@dataclass(frozen=True, slots=True)
class _Round:
    """`bare`: from the order of first runs, nothing run twice; else from the best so far or, where
    nothing fits, from that with the least excess. `rescue`: only where nothing fits yet."""

    cooling: Cooling
    share: float
    bare: bool = False
    rescue: bool = False


_HOT = Cooling(hot=1.2, cold=0.05, low=1.0, high=25.0)
_COOL = Cooling(hot=0.3, cold=0.03, low=8.0, high=25.0)
_SOFT = Cooling(hot=0.3, cold=0.04, low=0.02, high=10.0)
_DEAR = Cooling(hot=0.3, cold=0.05, low=10.0, high=100.0)
_FIRST = (
    _Round(_COOL, 0.05),
    _Round(_HOT, 0.4, bare=True),
    _Round(_DEAR, 0.1, rescue=True),
)
_LATER = (_Round(_HOT, 0.25), _Round(_COOL, 0.2))
# In one order, excess must be cheap at first: to throw out a value over a long stretch in favour of
# another leads through sequences that are over the budget at hundreds of runs.
_ROUNDS_IN_ORDER = (
    _Round(_SOFT, 0.35, bare=True),
    _Round(_DEAR, 0.1, rescue=True),
    _Round(_SOFT, 0.3, bare=True),
    _Round(_DEAR, 0.1, rescue=True),
    _Round(_SOFT, 0.25),
)


def _never() -> bool:
    return False


def search_schedule(
    graph: Graph,
    budget_bytes: int,
    start: Schedule,
    *,
    effort: int = EFFORT,
    seed: int = 0,
    stop: Callable[[], bool] = _never,
) -> Schedule:
    """The cheapest schedule found with a peak of at most `budget_bytes`, constant memory included.

    Never a worse one than `start`: if nothing that fits is found, the one with the smallest peak.
    Operations run in any order that `guarded` allows; raises `GraphError` if `start` does not.
    """
    search = _Search(guarded(graph), _MIX, budget_bytes, start, seed, stop)
    for turn in _FIRST:
        search.anneal(turn, round(effort * turn.share))
    search.evict()
    for turn in _LATER:
        search.anneal(turn, round(effort * turn.share))
    return search.best.schedule


def search_in_order(
    graph: Graph,
    budget_bytes: int,
    start: Schedule,
    *,
    effort: int = EFFORT,
    seed: int = 0,
    stop: Callable[[], bool] = _never,
) -> Schedule:
    """As `search_schedule`, where operations first run in the graph's order and `start` does so."""
    search = _Search(pinned(graph), _IN_ORDER, budget_bytes, start, seed, stop)
    for turn in _ROUNDS_IN_ORDER:
        search.anneal(turn, round(effort * turn.share))
    return search.best.schedule


class _Search:
    """`graph` is framed: every topological order of it is allowed."""

    def __init__(
        self,
        graph: Graph,
        mix: Mix,
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
        self.best = Rated.of(self.graph, start)
        self.nearest = start.runs
        self.excess_bytes = float("inf")

    def is_done(self) -> bool:
        """No schedule is cheaper than one that runs nothing twice."""
        return self._fits(self.best) and len(self.best.schedule) == len(self.graph)

    def anneal(self, turn: _Round, effort: int) -> None:
        """One round."""
        is_fit = self._fits(self.best)
        if self.is_done() or self.stop() or (turn.rescue and is_fit):
            return
        runs = self.best.schedule.runs if is_fit else self.nearest
        if turn.bare:
            runs = first_runs(self.start)
        profile = Profile(self.graph, self.budget_bytes, runs)
        found: list[int] = []
        least_s = self.best.time_s if is_fit else float("inf")

        def record(profile: Profile) -> bool:
            nonlocal found, least_s
            if profile.time_s < least_s * (1 - _LEAST_GAIN):
                found, least_s = profile.runs, profile.time_s
            return len(found) == len(self.graph)

        anneal(
            profile,
            self.random,
            turn.cooling,
            self.mix,
            effort=effort,
            fits=record,
            stop=self.stop,
        )
        if profile.excess_bytes < self.excess_bytes:
            self.nearest, self.excess_bytes = tuple(profile.runs), profile.excess_bytes
        self._offer(Schedule.of(found or profile.runs))

    def evict(self) -> None:
        """If nothing fits yet: what eviction finds in the order that came nearest."""
        if self._fits(self.best) or self.stop():
            return
        permuted, back = reordered(self.graph, first_runs(Schedule.of(self.nearest)))
        work = _EVICTIONS * len(self.graph)
        found = fitting(permuted, self.budget_bytes, effort=work, stop=self.stop)
        if not found:
            found = [
                smallest(permuted, target_bytes=self.budget_bytes, effort=work, stop=self.stop)
            ]
        self._offer(back(found[0].schedule))

    def _offer(self, schedule: Schedule) -> None:
        rated = Rated.of(self.graph, prune(self.graph, schedule))
        self.best = min(self.best, rated, key=self._rank)

    def _fits(self, rated: Rated) -> bool:
        return rated.peak_bytes <= self.budget_bytes

    def _rank(self, rated: Rated) -> tuple[int, float, int]:
        return max(rated.peak_bytes, self.budget_bytes), rated.time_s, rated.peak_bytes
