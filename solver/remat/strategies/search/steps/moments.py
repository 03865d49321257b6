"""The steps that relax the problem to moments: the bound first, then more and more moments beside
the programs over slots. HiGHS lets go of Python's lock while it runs, so a thread is enough to use
a second core.
"""

from __future__ import annotations

from remat.heuristics.local_search import fitting
from remat.milp.advice import Advisor
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known

_PROGRAM_S = 20.0
"""Seconds for one program at most."""

_FOLLOW = 12
"""Operations run to follow one piece of advice, in units of the graph's."""


def relax(known: Known, clock: Clock) -> None:
    """The relaxation at the worst moments: a bound for the order, and advice for eviction."""
    budget_bytes = known.task.budget_bytes
    assert budget_bytes is not None
    known.advisor = Advisor(
        known.task.graph,
        budget_bytes,
        gap=known.options.gap,
        deadline=known.clock.deadline,
        stop=clock.is_over,
    )


def more_moments(known: Known, clock: Clock) -> None:
    """Programs over more and more moments, and schedules that follow their advice."""
    advisor = known.advisor
    if advisor is None:
        return
    for advice in advisor.pursue(lambda: known.best, _PROGRAM_S, clock.is_over):
        found = fitting(
            known.graph,
            known.budget_bytes,
            known=known.schedules,
            advice=[advice],
            enough=known.is_enough,
            effort=_FOLLOW * len(known.graph),
            stop=clock.is_over,
        )
        known.offer(rated.schedule for rated in found)
        if clock.is_over():
            return
