"""Large-neighbourhood search: free the recomputations of one window of the sequence at a time.

Everything that the schedule recomputes stays on offer, and before the operations of the window so
does what can be made again from far back. Such programs are small and solve in a second or less
where one over the whole sequence stalls.
"""

from __future__ import annotations

import time

from remat.milp import slots
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.strategies.programs import Programs

_BACK = 30
_IDLE = 4
_REGION = 20
_SLOTS = 300
_WINDOW_S = 2.0
_ENOUGH = 0.1
_FACTS = ("slots", "rows", "columns", "nodes", "solver_message")
"""What `Plan.stats` says of the program that proved the bound, not of the windows."""


def refine(
    programs: Programs,
    schedule: Schedule,
    budget_bytes: int,
    until: float,
    bound_s: float | None,
) -> Schedule:
    """A schedule at most as dear; windows go from the end to the start, again and again.

    Ends at `until`, within the gap of `bound_s`, or after a pass that won little of that gap.
    """
    end = len(programs.graph)
    facts = {key: programs.stats[key] for key in _FACTS}
    rounds = 0
    gap = programs.options.gap
    at_start_s = programs.time(schedule)

    def is_over() -> bool:
        time_s = programs.time(schedule)
        enough = bound_s is not None and time_s - bound_s <= gap * time_s
        return enough or time.monotonic() >= until or programs.is_cancelled()

    while not is_over():
        if end <= 0:
            won_s = at_start_s - programs.time(schedule)
            if won_s <= _ENOUGH * gap * at_start_s:
                break
            end, at_start_s = len(programs.graph), programs.time(schedule)
        window, offered = _window(programs, schedule, end)
        end -= max(1, len(window) // 2)
        if not offered.optional_count:
            continue
        left = min(_WINDOW_S, until - time.monotonic())
        answer, _ = programs.solve_cost(offered, budget_bytes, schedule, time_limit=left)
        if answer.schedule is not None:
            schedule = min(schedule, answer.schedule, key=programs.time)
        rounds += 1
    programs.stats |= facts
    programs.stats["windows"] = rounds
    return schedule


def _window(programs: Programs, schedule: Schedule, end: int) -> tuple[range, Slots]:
    """The operations up to `end`, as many as a small program can take; and the slots."""
    width = max(8, len(programs.graph) // 3)
    while True:
        window = range(max(0, end - width), end)
        offered = slots.near(
            programs.graph,
            back=_BACK,
            every=1,
            idle=_IDLE,
            region=_REGION,
            known=[schedule],
            stages=window,
        )
        kept = len(schedule) - len(programs.graph)
        if offered.optional_count <= kept + _SLOTS or width <= 8:
            return window, offered
        width //= 2
