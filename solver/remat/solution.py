"""`Solution`: a schedule with what is proved about it, as a strategy answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from remat.schedule import Schedule

Stats = dict[str, str | int | float]
"""Flat facts about a solve; keys that end in `_s` are seconds."""

FAILURES = ("solver_error", "search_error")
"""Of `Stats`: why a solver backend, and why a part of the search, failed on the way."""

STEPS = "steps"
"""Of `Stats`: the names of the steps of the solve in their order, with spaces between. A step has
`NAME_s`, and what was known after it: `NAME_cost` and `NAME_bound`, shares of extra time, or, where
the smallest peak was looked for, `NAME_bytes` and `NAME_bound_bytes`; and `NAME_beside`, where it
ran beside those that follow."""

STEP_FACTS = ("s", "cost", "bound", "bytes", "bound_bytes")

BoundScope = Literal["slots", "order", "all orders"]
"""For which space a bound is proved: the slots offered (with small values kept throughout, where
`stats` names `reserve_bytes` for them), every schedule of the graph's order, or every schedule at
all. A schedule of the order is one of Checkmate's: between two first runs, each operation runs at
most once, and those that do run in the order (`docs/decisions/0039`)."""


def steps_of(stats: Mapping[str, str | int | float]) -> list[str]:
    """The names of the steps that a solve took."""
    return str(stats.get(STEPS, "")).split()


def joined(before: Stats, after: Stats) -> Stats:
    """The facts of two solves, the later ones where both have one, and the steps of both."""
    both = {**before, **after}
    if steps := [*steps_of(before), *steps_of(after)]:
        both[STEPS] = " ".join(dict.fromkeys(steps))
    return both


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with what is proved about it.

    `bound` is a lower bound on the total time, in the graph's cost unit, or on the peak, in
    bytes, where the smallest peak was asked for; None if nothing is proved. `proved` says that
    the schedule is within the gap asked for of `bound`; over slots, that makes no plan OPTIMAL.
    """

    schedule: Schedule
    bound: float | None = None
    bound_scope: BoundScope = "slots"
    proved: bool = False
    stats: Stats = field(default_factory=dict[str, str | int | float])

    @property
    def steps(self) -> Stats:
        """What `stats` say of each step."""
        keys = [f"{name}_{fact}" for name in steps_of(self.stats) for fact in STEP_FACTS]
        return {key: self.stats[key] for key in (STEPS, *keys) if key in self.stats}

    @property
    def failure(self) -> Stats:
        """What `stats` say of a solver, or a part of the search, that failed on the way."""
        return {key: why for key, why in self.stats.items() if key in FAILURES}
