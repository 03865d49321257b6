"""`Solution`: a strategy's answer, a schedule with the bound that is proved for it; and the keys of
its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from remat.schedule import Schedule

Stat = str | int | float
"""A statistic: a text or a number."""

Stats = dict[str, Stat]
"""Flat statistics of a solve; keys that end in `_s` are seconds."""

FAILURES = ("solver_error", "search_error")
"""Keys of `Stats`: why a solver backend failed, and why a part of the search failed."""

STEPS = "steps"
"""Key of `Stats`: the names of the steps of a solve in order, separated by spaces.

A step NAME has `NAME_s`, its seconds, and the state after it: `NAME_cost` and `NAME_bound`, as
fractions of extra time, or, in a search for the smallest peak, `NAME_bytes` and `NAME_bound_bytes`.
`NAME_concurrent` is set if it ran concurrently with the steps that follow.
"""

STEP_STAT_SUFFIXES = ("s", "cost", "bound", "bytes", "bound_bytes")
"""Suffixes of a step's keys in `Stats`."""

BoundScope = Literal["slots", "order", "all orders"]
"""The schedules that a bound is proved for: those over the slots, every schedule of the plan's
order, or every schedule. The plan's order is that of its first runs: the graph's, or an annealed
one.

With "slots", small values are always retained if `stats` has `small_values_bytes`. A schedule of
the order is one of Checkmate's: between two first runs, each operation runs at most once, and in
the order (`docs/decisions/0008`).
"""


def step_names(stats: Mapping[str, Stat]) -> list[str]:
    """Return the names of the steps that a solve ran."""
    return str(stats.get(STEPS, "")).split()


def merge_stats(before: Stats, after: Stats) -> Stats:
    """Return the statistics of two solves: all steps of both, and the later value of any other
    key."""
    both = {**before, **after}
    if steps := [*step_names(before), *step_names(after)]:
        both[STEPS] = " ".join(dict.fromkeys(steps))
    return both


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with what is proved about it.

    `bound` is a lower bound on the total time, in the graph's cost unit, or on the peak in bytes,
    if the smallest peak was asked for; None if nothing is proved. `proved` is true if the schedule
    is within the requested gap of `bound`; with the scope "slots" that makes no plan OPTIMAL.
    """

    schedule: Schedule
    bound: float | None = None
    bound_scope: BoundScope = "slots"
    proved: bool = False
    stats: Stats = field(default_factory=dict[str, Stat])

    @property
    def step_stats(self) -> Stats:
        """The statistics of the steps alone."""
        keys = [f"{name}_{fact}" for name in step_names(self.stats) for fact in STEP_STAT_SUFFIXES]
        return {key: self.stats[key] for key in (STEPS, *keys) if key in self.stats}

    @property
    def failure_stats(self) -> Stats:
        """The reasons in the statistics why a solver, or a part of the search, failed."""
        return {key: why for key, why in self.stats.items() if key in FAILURES}
