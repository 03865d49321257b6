"""The steps that run a program over slots of the whole sequence: first over those that its
relaxation uses, then over all that can improve on what is known.

To recombine is a program over the slots that the best schedules use and those that a relaxation
uses, at moments or over all slots: few, and the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.milp import slots
from remat.milp.support import support
from remat.schedule import Schedule
from remat.strategies.search.clock import Clock
from remat.strategies.search.known import Known, OverSlots

_FAR = 100
"""Slots of an operation further apart than this many operations are no group."""

_WELL = 0.3
"""Of the gap: to what a recombination is solved, so that a bound proved later can meet it."""


def sift(known: Known, clock: Clock) -> None:
    """The best out of what the best schedule and the relaxation over the slots run again."""
    if known.runner.is_over():
        return
    used = support(
        known.graph,
        known.offered(),
        known.budget_bytes,
        time_limit=clock.left_s,
        cancelled=clock.is_cancelled,
    )
    if used is not None and not clock.is_over():
        recombine(known, [used], clock)


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
