"""The steps that solve a program over slots of the whole sequence: first over the slots that its
relaxation uses, then over all that can improve on the incumbent.

`recombine_schedules` solves a program over the slots that the best schedule uses and those that a
relaxation uses, at checkpoint cuts or over all slots: few, and the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from remat.errors import SolverError
from remat.graph import Graph
from remat.heuristics.eviction import EVICTION_RULES, advice_to_retain
from remat.milp import slots
from remat.milp.backends import SolverOutcome
from remat.milp.model import MilpModel
from remat.milp.slots import Slots
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import value_of
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.search.eviction import follow_advice
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


def recombine_relaxation(state: SearchState, clock: Clock) -> None:
    """Add the best schedule over the recomputations of the incumbent and of the relaxation over the
    slots. Nothing if no relaxation was solved."""
    if state.runner.is_stopped():
        return
    support = _relax_over_slots(state, clock)
    if support is not None and not clock.is_set():
        recombine_schedules(state, [support.schedule], clock)


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
        support = _relax_over_slots(state, clock, coarseness) or support
        if support is not None:
            _evict_by_support(state, support, clock)
        won_s = before_s - state.objective
        is_improved = won_s > _MIN_WIN_SHARE * state.options.gap * before_s
        vain_rounds = 0 if is_improved else vain_rounds + 1
        if vain_rounds == _MAX_VAIN_ROUNDS:
            break
    if support is not None:
        recombine_schedules(state, [support.schedule], clock)


def _relax_over_slots(
    state: SearchState, clock: Clock, coarseness: int = 1
) -> RelaxationSupport | None:
    """Return the support of the relaxation over the slots that can improve on the incumbent, fewer
    with a `coarseness` above 1; None if it was not solved."""
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
        advice = advice_to_retain(support.retained_shares, factor)
        follow_advice(state, advice, clock, _RUNS_PER_OPERATION, EVICTION_RULES)
        if state.objective == before_s:
            return


def recombine_schedules(state: SearchState, schedules: Sequence[Schedule], clock: Clock) -> None:
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
    """Solve the program for the smallest peak over all slots. Nothing if it can prove no bound, as
    the slots are not complete, and there is no target to reach."""
    slot_set = state.candidate_slots()
    if not slot_set.is_complete and state.target_bytes is None:
        return
    answer, bound_bytes = state.runner.minimize_peak(
        slot_set, state.best, clock.remaining_s, state.target_bytes, state.bound
    )
    state.add_schedules([answer.schedule or state.best])
    state.slot_result = SlotProgramResult(answer.outcome, bound_bytes, slot_set.is_complete)


_MIN_SHARE = 1e-4
"""Smaller values of the relaxation's variables count as zero."""
_MAX_ADVISED_OPERATIONS = 500

Shares = dict[int, float]
"""By value, the share of it that is retained (0 to 1); values that are left out are not."""


class RelaxationSupport(NamedTuple):
    """The schedule of all slots that a solved relaxation uses, which need not fit the budget, and
    the shares of values that it retains before operations, in their order."""

    schedule: Schedule
    retained_shares: list[tuple[int, Shares]]


def relaxation_support(
    graph: Graph,
    slots: Slots,
    budget_bytes: int,
    *,
    time_limit: float,
    is_cancelled: Callable[[], bool] | None = None,
) -> RelaxationSupport | None:
    """Solve the relaxation over the slots and return its support.

    Returns None if no relaxed schedule fits, or the time was too short.
    """
    relaxed = MilpModel(graph, slots, budget_bytes)
    highs = HighsSolver(gap=0.0, time_limit=time_limit, threads=1, is_cancelled=is_cancelled)
    try:
        answer = highs.run(relaxed.arrays.relaxed())
    except SolverError:
        return None
    if answer.bound is None:
        return None
    schedule = slots.schedule(
        slot for slot, run in relaxed.run_columns.items() if value_of(run) > _MIN_SHARE
    )
    stride = 1 + len(graph) // _MAX_ADVISED_OPERATIONS
    shares = [(op, dict(s)) for op, s in retained_shares(graph, relaxed) if op % stride == 0]
    return RelaxationSupport(schedule, shares)


def retained_shares(graph: Graph, relaxed: MilpModel) -> Iterator[tuple[int, Shares]]:
    """Yield each operation, in order, with the shares that a solved relaxation retains before it.

    Values without a variable (results, and values without bytes) are left out.
    """
    shares: Shares = {}
    for slot, op in enumerate(relaxed.slots.operations):
        if not relaxed.slots.is_optional[slot]:
            yield op, shares
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            share = value_of(relaxed.retained.get((slot, v), 0))
            if share > _MIN_SHARE:
                shares[v] = share
            else:
                shares.pop(v, None)


_WINDOW_MAX_DISTANCE = 30
_WINDOW_MIN_IDLE = 4
_WINDOW_GROUP_SPAN = 20
_MAX_EXTRA_SLOTS = 300
"""Optional slots of a window's program, in addition to the schedule's own recomputations."""
_MIN_WINDOW = 8
_RECOMBINE_TIME_S = 10.0
_WINDOW_TIME_S = 2.0
_MIN_PASS_WIN_SHARE = 0.1
"""Share of the requested gap that a pass has to win for there to be another."""

_MILP_STATS = ("slots", "rows", "columns", "nodes", "solver_message")
"""Statistics that describe the program that proved the bound, not the windows' programs."""


def is_gap_open(state: SearchState) -> bool:
    """True if the program over slots was not solved to optimality."""
    return state.slot_result is None or state.slot_result.outcome is not SolverOutcome.OPTIMAL


def improve_windows(state: SearchState, clock: Clock) -> None:
    """Solve windows from the end of the sequence to its start, pass by pass, each from the best
    incumbent by then.

    Ends when the time is up, within the gap of a bound that is proved for the order or over the
    slots, or after a pass that won little.
    """
    runner, gap = state.runner, state.options.gap
    milp_stats = {key: state.stats[key] for key in _MILP_STATS if key in state.stats}
    end, windows = len(state.graph), 0
    objective_before_s = state.objective
    while not (_is_within_any_bound(state) or clock.is_set() or runner.is_stopped()):
        if end <= 0:
            recombine_schedules(
                state, state.candidate_schedules, clock.limited_to(_RECOMBINE_TIME_S)
            )
            won_s = objective_before_s - state.objective
            if won_s <= _MIN_PASS_WIN_SHARE * gap * objective_before_s:
                break
            end, objective_before_s = len(state.graph), state.objective
        best = state.best
        window, slot_set = _window_slots(state.graph, best, end)
        end = max(0, end - max(1, len(window) // 2))
        if not slot_set.optional_count:
            continue
        time_limit_s = min(_WINDOW_TIME_S, clock.remaining_s)
        answer, _ = runner.minimize_cost(
            slot_set, state.budget_bytes, best, time_limit_s, state.is_good_enough,
            proved_bound_s=state.bound,
        )  # fmt: skip
        state.add_schedules([answer.schedule or best])
        windows += 1
    state.stats |= milp_stats
    state.stats["windows"] = windows


def _is_within_any_bound(state: SearchState) -> bool:
    """True if the best incumbent is within the gap of the bound for the order or of the bound over
    the slots."""
    result = state.slot_result
    required_bound = state.objective * (1 - state.options.gap)
    return state.is_within_gap or (
        result is not None and result.bound is not None and result.bound >= required_bound
    )


def _window_slots(graph: Graph, schedule: Schedule, end: int) -> tuple[range, Slots]:
    """Return a window that ends before operation `end`, as long as a small program can take, and
    the slots of that program, which can express `schedule`."""
    width = max(_MIN_WINDOW, len(graph) // 3)
    while True:
        window = range(max(0, end - width), end)
        slot_set = slots.build_idle_read_slots(
            graph,
            max_distance=_WINDOW_MAX_DISTANCE,
            stride=1,
            min_idle=_WINDOW_MIN_IDLE,
            group_span=_WINDOW_GROUP_SPAN,
            schedules=[schedule],
            stages=window,
        )
        recomputations = len(schedule) - len(graph)
        if slot_set.optional_count <= recomputations + _MAX_EXTRA_SLOTS or width <= _MIN_WINDOW:
            return window, slot_set
        width //= 2
