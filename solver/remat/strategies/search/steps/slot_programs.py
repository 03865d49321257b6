"""The steps that solve a program over slots of the whole sequence: first over the slots that its
relaxation uses, then over all that can improve on the incumbent.

`recombine` solves a program over the slots that the best schedule uses and those that a relaxation
uses, at checkpoint cuts or over all slots: few, and the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from remat.heuristics.eviction import EVICTION_RULES
from remat.heuristics.local_search import schedules_within_budget
from remat.milp import slots
from remat.milp.relaxation_support import RelaxationSupport, relaxation_support
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.search.state import SearchState, SlotProgramResult

_GROUP_SPAN = 100
"""Slots of one operation that are further apart than this many operations form no group."""

_RETENTION_FACTORS = (1e-1, 1e-3)
"""Factors on the eviction score of a value that the relaxation retains fully."""

_RUNS_PER_OPERATION = 20
"""Operations that eviction may run per piece of advice, in multiples of the graph's."""

_COARSENESS_LEVELS = (1, 2, 4)
_MIN_WIN_SHARE, _MAX_VAIN_ROUNDS = 0.5, 2
"""Share of the requested gap that a relaxation has to win, and the number of rounds in a row that
may win less."""

_RECOMBINE_GAP_SHARE = 0.3
"""Share of the requested gap to which a recombination is solved, so that a bound that is proved
later can meet it."""


def solve_relaxation_support(state: SearchState, clock: Clock) -> None:
    """Add the best schedule over the recomputations of the incumbent and of the relaxation over
    the slots."""
    if state.runner.is_stopped():
        return
    support = _solve_relaxation(state, clock)
    if support is not None and not clock.is_set():
        recombine(state, [support.schedule], clock)


def evict_by_relaxation(state: SearchState, clock: Clock) -> None:
    """Add schedules by eviction that follow the relaxation over the slots.

    The relaxation is repeated over fewer and fewer slots, until two in a row win little. Then the
    recomputations of the incumbent and of the last relaxation are recombined.
    """
    vain_rounds = 0
    support: RelaxationSupport | None = None
    for coarseness in cycle(_COARSENESS_LEVELS):
        if clock.is_set() or state.is_within_gap or state.runner.is_stopped():
            return
        before_s = state.objective
        support = _solve_relaxation(state, clock, coarseness) or support
        if support is not None:
            _evict_by_support(state, support, clock)
        won_s = before_s - state.objective
        is_improved = won_s > _MIN_WIN_SHARE * state.options.gap * before_s
        vain_rounds = 0 if is_improved else vain_rounds + 1
        if vain_rounds == _MAX_VAIN_ROUNDS:
            break
    if support is not None:
        recombine(state, [support.schedule], clock)


def _solve_relaxation(
    state: SearchState, clock: Clock, coarseness: int = 1
) -> RelaxationSupport | None:
    return relaxation_support(
        state.graph,
        state.candidate_slots(coarseness),
        state.budget_bytes,
        time_limit=clock.remaining_s,
        is_cancelled=clock.is_cancelled,
    )


def _evict_by_support(state: SearchState, support: RelaxationSupport, clock: Clock) -> None:
    """Add schedules by eviction that retain what the relaxation retains, for as long as that
    improves the incumbent."""
    for factor in _RETENTION_FACTORS:
        before_s = state.objective
        advice = [
            (op, {v: factor**share for v, share in shares.items()})
            for op, shares in support.retained_shares
        ]
        candidates = schedules_within_budget(
            state.graph,
            state.budget_bytes,
            incumbents=state.schedules,
            advice=[advice],
            rules=EVICTION_RULES,
            is_good_enough=state.is_good_enough,
            max_runs=_RUNS_PER_OPERATION * len(state.graph),
            stop=clock.is_set,
        )
        state.add_schedules(candidate.schedule for candidate in candidates)
        if state.objective == before_s:
            return


def recombine(state: SearchState, schedules: Sequence[Schedule], clock: Clock) -> None:
    """Add the best schedule over the recomputations of the incumbent and of `schedules`, which need
    not fit. Few slots, well chosen: the most effective step by far."""
    best = state.best
    slot_set = slots.build_recombination_slots(
        state.graph, [best, *schedules], group_span=_GROUP_SPAN
    )
    gap = _RECOMBINE_GAP_SHARE * state.options.gap
    answer, _ = state.runner.minimize_cost(
        slot_set,
        state.budget_bytes,
        best,
        clock.remaining_s,
        state.is_good_enough,
        gap,
        state.bound,
    )
    state.add_schedules([answer.schedule or best])


def minimize_cost_over_slots(state: SearchState, clock: Clock) -> None:
    """Solve the program over all slots that can improve on the incumbent, and record the bound
    that it proves."""
    best, slot_set = state.best, state.candidate_slots()
    answer, bound_s = state.runner.minimize_cost(
        slot_set, state.budget_bytes, best, clock.remaining_s, state.is_good_enough,
        proved_bound_s=state.bound,
    )  # fmt: skip
    state.add_schedules([answer.schedule or best])
    state.slot_result = SlotProgramResult(answer.outcome, bound_s, slot_set.is_complete)


def minimize_peak_over_slots(state: SearchState, clock: Clock) -> None:
    """Solve the program for the smallest peak over all slots, if it can prove a bound or has a
    target to reach."""
    slot_set = state.candidate_slots()
    if not slot_set.is_complete and state.target_bytes is None:
        return
    answer, bound_bytes = state.runner.minimize_peak(
        slot_set, state.best, clock.remaining_s, state.target_bytes, state.bound
    )
    state.add_schedules([answer.schedule or state.best])
    state.slot_result = SlotProgramResult(answer.outcome, bound_bytes, slot_set.is_complete)
