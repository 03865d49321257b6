"""The steps that run a program over slots of the whole sequence: first over those that its
relaxation uses, then over all that can improve on what is known.

To recombine is a program over the slots that the best schedules use and those that a relaxation
uses, at moments or over all slots: few, and the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from remat.heuristics.eviction import RULES
from remat.heuristics.local_search import fitting
from remat.milp import slots
from remat.milp.support import Support, support
from remat.schedule import Schedule
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known, OverSlots

_FAR = 100
"""Slots of an operation further apart than this many operations are no group."""

_HOLD = (1e-1, 1e-3)
"""How much less a value that should be held is worth throwing out."""

_ATTEMPTS = 20
"""Operations that eviction may run for one piece of advice, in units of the graph's."""

_COARSENESS = (1, 2, 4)
_MUCH, _IN_VAIN = 0.5, 2
"""Of the gap: what a relaxation has to win; and how many in a row may win less."""

_WELL = 0.3
"""Of the gap: to what a recombination is solved, so that a bound proved later can meet it."""


def sift(known: Known, clock: Clock) -> None:
    """The best out of what the best schedule and the relaxation over the slots run again."""
    if known.runner.is_over():
        return
    found = _relaxed(known, clock)
    if found is not None and not clock.is_over():
        recombine(known, [found.used], clock)


def follow(known: Known, clock: Clock) -> None:
    """What eviction finds by the advice of the relaxation over the slots, over fewer of them, and
    over fewer still, until two in a row win little; and then the best out of that and of what the
    last relaxation runs again."""
    in_vain, found = 0, None
    for coarseness in cycle(_COARSENESS):
        if clock.is_over() or known.is_within_gap or known.runner.is_over():
            return
        before_s = known.objective
        found = _relaxed(known, clock, coarseness) or found
        if found is not None:
            _advise(known, found, clock)
        won_s = before_s - known.objective
        in_vain = 0 if won_s > _MUCH * known.options.gap * before_s else in_vain + 1
        if in_vain == _IN_VAIN:
            break
    if found is not None:
        recombine(known, [found.used], clock)


def _relaxed(known: Known, clock: Clock, coarseness: int = 1) -> Support | None:
    return support(
        known.graph,
        known.offered(coarseness),
        known.budget_bytes,
        time_limit=clock.left_s,
        cancelled=clock.is_cancelled,
    )


def _advise(known: Known, found: Support, clock: Clock) -> None:
    """Offers what eviction finds by that advice, as long as it wins anything."""
    for base in _HOLD:
        before_s = known.objective
        advice = [
            (op, {v: base**share for v, share in shares.items()}) for op, shares in found.held
        ]
        rated = fitting(
            known.graph,
            known.budget_bytes,
            known=known.schedules,
            advice=[advice],
            rules=RULES,
            enough=known.is_enough,
            effort=_ATTEMPTS * len(known.graph),
            stop=clock.is_over,
        )
        known.offer(each.schedule for each in rated)
        if known.objective == before_s:
            return


def recombine(known: Known, hints: Sequence[Schedule], clock: Clock) -> None:
    """The best out of what the best schedule and the hints run again, which need not fit. Few
    slots, well chosen: the strongest step by far."""
    best = known.best
    offered = slots.recombined(known.graph, [best, *hints], region=_FAR)
    gap = _WELL * known.options.gap
    answer, _ = known.runner.solve_cost(
        offered, known.budget_bytes, best, clock.left_s, known.is_enough, gap
    )
    known.offer([answer.schedule or best])


def prove(known: Known, clock: Clock) -> None:
    """The program over all slots that can improve on the best, and the bound that it proves."""
    best, offered = known.best, known.offered()
    answer, bound_s = known.runner.solve_cost(
        offered, known.budget_bytes, best, clock.left_s, known.is_enough
    )
    known.offer([answer.schedule or best])
    known.over_slots = OverSlots(answer.outcome, bound_s, offered.complete)


def prove_smallest(known: Known, clock: Clock) -> None:
    """The program for the peak over all slots, where it can prove something, or reach a target."""
    offered = known.offered()
    if not offered.complete and known.target_bytes is None:
        return
    answer, bound = known.runner.solve_peak(offered, known.best, clock.left_s, known.target_bytes)
    known.offer([answer.schedule or known.best])
    known.over_slots = OverSlots(answer.outcome, bound, offered.complete)
