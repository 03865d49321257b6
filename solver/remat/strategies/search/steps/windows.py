"""The step that frees the best schedule window by window: large-neighbourhood search.

Outside a window, the slots are the recomputations of the schedule; in it, all recomputations from
far back have slots too. Such programs are small and solve in seconds where one over the whole
sequence stalls. After each pass over the sequence, the schedules found so far are recombined.
"""

from __future__ import annotations

from remat.graph import Graph
from remat.milp import slots
from remat.milp.backends import SolverOutcome
from remat.milp.slots import Slots
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.search.state import SearchState
from remat.strategies.search.steps.slot_programs import recombine

_MAX_DISTANCE = 30
_MIN_IDLE = 4
_GROUP_SPAN = 20
_MAX_EXTRA_SLOTS = 300
"""Optional slots of a window's program, in addition to the schedule's own recomputations."""
_MIN_WINDOW = 8
_RECOMBINE_TIME_S = 10.0
_WINDOW_TIME_S = 2.0
_MIN_WIN_SHARE = 0.1
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
            recombine(state, state.candidate_schedules, clock.limited_to(_RECOMBINE_TIME_S))
            won_s = objective_before_s - state.objective
            if won_s <= _MIN_WIN_SHARE * gap * objective_before_s:
                break
            end, objective_before_s = len(state.graph), state.objective
        best = state.best
        window, slot_set = _window(state.graph, best, end)
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


def _window(graph: Graph, schedule: Schedule, end: int) -> tuple[range, Slots]:
    """Return as many operations up to `end` as a small program can take, and its slots."""
    width = max(_MIN_WINDOW, len(graph) // 3)
    while True:
        window = range(max(0, end - width), end)
        slot_set = slots.build_idle_read_slots(
            graph,
            max_distance=_MAX_DISTANCE,
            stride=1,
            min_idle=_MIN_IDLE,
            group_span=_GROUP_SPAN,
            schedules=[schedule],
            stages=window,
        )
        recomputations = len(schedule) - len(graph)
        if slot_set.optional_count <= recomputations + _MAX_EXTRA_SLOTS or width <= _MIN_WINDOW:
            return window, slot_set
        width //= 2
