"""The steps that evict: for the least cost within a budget, and for the smallest peak."""

from __future__ import annotations

from remat.graph import Graph
from remat.heuristics.local_search import Rated, fitting, smallest
from remat.milp.small import set_aside
from remat.schedule import Schedule
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known

_WELL, _MORE = 0.1, 0.03
"""Eviction goes on to this share of the gap, for up to this share of the time."""


_LIGHT = 0.5
"""The share of the step's time that it may look with small values set aside."""

_EFFORT, _ATTEMPTS = 20_000, 30
"""Operations that eviction may run, and in units of the graph's if that is more: what it has not
found by then, the steps that follow find sooner."""


def evict(known: Known, clock: Clock) -> None:
    """Schedules under the advice of the moments, and around the best of them.

    Small values are set aside where that leaves something that fits, for this step and those that
    follow.
    """
    room_bytes = known.budget_bytes - known.graph.constant_bytes
    light, reserve_bytes = set_aside(known.graph, int(known.reserve * room_bytes))
    if reserve_bytes:
        left_bytes = known.budget_bytes - reserve_bytes
        if found := _fitting(known, light, left_bytes, clock.share(_LIGHT)):
            known.stats["reserve_bytes"] = reserve_bytes
            known.set_aside(light, left_bytes)
            known.offer(found)
            return
    known.offer(_fitting(known, known.graph, known.budget_bytes, clock))


def _fitting(known: Known, graph: Graph, budget_bytes: int, clock: Clock) -> list[Schedule]:
    advisor = known.advisor

    def is_enough(time_s: float) -> bool:
        late = clock.passed_s > _MORE * known.options.time_limit
        return known.is_enough(time_s, 1.0 if late else _WELL)

    found: list[Rated] = fitting(
        graph,
        budget_bytes,
        known=known.schedules,
        advice=() if advisor is None else advisor.advice(),
        enough=is_enough,
        effort=max(_EFFORT, _ATTEMPTS * len(graph)),
        stop=clock.is_over,
    )
    return [rated.schedule for rated in found]


def shrink(known: Known, clock: Clock) -> None:
    """The smallest peak that eviction finds, down to the target."""
    target_bytes = known.floor_bytes if known.target_bytes is None else known.target_bytes
    start = known.best if known.rated else None
    found = smallest(known.graph, target_bytes=target_bytes, start=start, stop=clock.is_over)
    known.offer([found.schedule])
