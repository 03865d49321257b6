"""Large-neighbourhood search: recombine what known schedules run again, and free window by window.

To recombine is a program over the slots that the best schedules use and those that a relaxation
uses, at moments or over all slots (`sift`): few, and the right ones. In a window everything that
the schedule recomputes stays on offer, and before the operations of the window so does what can be
made again from far back. Such programs are small and solve in seconds where one over the whole
sequence stalls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from remat.milp import slots
from remat.milp.slots import Slots
from remat.milp.support import support
from remat.schedule import Schedule
from remat.strategies.search.programs import MilpRunner
from remat.strategies.search.pursuit import Pursuit

_BACK = 30
_IDLE = 4
_REGION = 20
_FAR = 100
_SLOTS = 300
_RECOMBINE_S = 10.0
_WINDOW_S = 2.0
_ENOUGH = 0.1
_WELL = 0.3
"""Of the gap: to what a recombination is solved, so that a bound proved later can meet it."""

_FACTS = ("slots", "rows", "columns", "nodes", "solver_message")
"""What `Plan.stats` says of the program that proved the bound, not of the windows."""


def refine(
    programs: MilpRunner,
    schedule: Schedule,
    budget_bytes: int,
    pursuit: Pursuit,
    bound_s: float | None,
    enough: Callable[[float], bool],
) -> Schedule:
    """A schedule at most as dear; windows go from the end to the start, again and again.

    Begins anew from what the pursuit finds where that is better. Ends with the time, within the
    gap of `bound_s`, where there is enough, or after a pass that won little.
    """
    end = len(programs.graph)
    facts = {key: programs.stats[key] for key in _FACTS if key in programs.stats}
    rounds = 0
    gap = programs.options.gap
    at_start_s = programs.time(schedule)

    def is_over() -> bool:
        time_s = programs.time(schedule)
        proved = bound_s is not None and time_s - bound_s <= gap * time_s
        late = time.monotonic() >= programs.deadline
        return proved or late or enough(time_s) or programs.is_over()

    while not is_over():
        schedule = min(schedule, pursuit.best, key=programs.time)
        if end <= 0:
            left = min(_RECOMBINE_S, programs.deadline - time.monotonic())
            hints = pursuit.hints
            schedule = recombine(programs, schedule, budget_bytes, hints, left, enough)
        if end <= 0:
            won_s = at_start_s - programs.time(schedule)
            if won_s <= _ENOUGH * gap * at_start_s:
                break
            end, at_start_s = len(programs.graph), programs.time(schedule)
        window, offered = _window(programs, schedule, end)
        end = max(0, end - max(1, len(window) // 2))
        if not offered.optional_count:
            continue
        left = min(_WINDOW_S, programs.deadline - time.monotonic())
        answer, _ = programs.solve_cost(offered, budget_bytes, schedule, left, enough)
        if answer.schedule is not None:
            schedule = min(schedule, answer.schedule, key=programs.time)
        rounds += 1
    programs.stats |= facts
    programs.stats["windows"] = rounds
    return schedule


def recombine(
    programs: MilpRunner,
    schedule: Schedule,
    budget_bytes: int,
    hints: Sequence[Schedule],
    time_limit: float,
    enough: Callable[[float], bool],
) -> Schedule:
    """A schedule at most as dear, out of what it and the hints run again, which need not fit. Few
    slots, well chosen: the strongest step by far."""
    offered = slots.recombined(programs.graph, [schedule, *hints], region=_FAR)
    gap = _WELL * programs.options.gap
    answer, _ = programs.solve_cost(offered, budget_bytes, schedule, time_limit, enough, gap)
    return min(schedule, answer.schedule or schedule, key=programs.time)


def sift(
    programs: MilpRunner,
    schedule: Schedule,
    budget_bytes: int,
    offered: Slots,
    time_limit: float,
    enough: Callable[[float], bool],
) -> Schedule:
    """A schedule at most as dear, out of what it and the relaxation over the slots run again."""
    if programs.is_over():
        return schedule
    until = time.monotonic() + time_limit
    used = support(
        programs.graph,
        offered,
        budget_bytes,
        time_limit=time_limit,
        cancelled=programs.is_cancelled,
    )
    left = until - time.monotonic()
    if used is None or left <= 0:
        return schedule
    return recombine(programs, schedule, budget_bytes, [used], left, enough)


def _window(programs: MilpRunner, schedule: Schedule, end: int) -> tuple[range, Slots]:
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
