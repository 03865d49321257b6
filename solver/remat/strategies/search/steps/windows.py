"""The step that frees the best schedule window by window: large-neighbourhood search.

In a window everything that the schedule recomputes stays on offer, and before the operations of the
window so does what can be made again from far back. Such programs are small and solve in seconds
where one over the whole sequence stalls. After each pass, what is known is recombined.
"""

from __future__ import annotations

from remat.graph import Graph
from remat.milp import slots
from remat.milp.backends import Outcome
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known
from remat.strategies.search.steps.slots import recombine

_BACK = 30
_IDLE = 4
_REGION = 20
_SLOTS = 300
_RECOMBINE_S = 10.0
_WINDOW_S = 2.0
_ENOUGH = 0.1
"""Of the gap: what a pass has to win for another."""

_FACTS = ("slots", "rows", "columns", "nodes", "solver_message")
"""What `Plan.stats` says of the program that proved the bound, not of the windows."""


def is_unproved(known: Known) -> bool:
    """Whether the program over slots left something open."""
    return known.over_slots is None or known.over_slots.outcome is not Outcome.OPTIMAL


def refine(known: Known, clock: Clock) -> None:
    """Windows from the end to the start, again and again, each from the best that is known by then.

    Ends with the time, within the gap of what is proved for the order or over the slots, or after a
    pass that won little.
    """
    runner, gap = known.runner, known.options.gap
    facts = {key: known.stats[key] for key in _FACTS if key in known.stats}
    end, rounds = len(known.graph), 0
    at_start_s = known.objective
    while not (_is_proved(known) or clock.is_over() or runner.is_over()):
        if end <= 0:
            recombine(known, known.hints, clock.within(_RECOMBINE_S))
            if at_start_s - known.objective <= _ENOUGH * gap * at_start_s:
                break
            end, at_start_s = len(known.graph), known.objective
        best = known.best
        window, offered = _window(known.graph, best, end)
        end = max(0, end - max(1, len(window) // 2))
        if not offered.optional_count:
            continue
        left_s = min(_WINDOW_S, clock.left_s)
        answer, _ = runner.solve_cost(offered, known.budget_bytes, best, left_s, known.is_enough)
        known.offer([answer.schedule or best])
        rounds += 1
    known.stats |= facts
    known.stats["windows"] = rounds


def _is_proved(known: Known) -> bool:
    over = known.over_slots
    least = known.objective * (1 - known.options.gap)
    return known.is_within_gap or (
        over is not None and over.bound is not None and over.bound >= least
    )


def _window(graph: Graph, schedule: Schedule, end: int) -> tuple[range, Slots]:
    """The operations up to `end`, as many as a small program can take; and the slots."""
    width = max(8, len(graph) // 3)
    while True:
        window = range(max(0, end - width), end)
        offered = slots.near(
            graph,
            back=_BACK,
            every=1,
            idle=_IDLE,
            region=_REGION,
            known=[schedule],
            stages=window,
        )
        kept = len(schedule) - len(graph)
        if offered.optional_count <= kept + _SLOTS or width <= 8:
            return window, offered
        width //= 2
