"""`Solution`: a schedule with what is proved about it, as a strategy answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remat.schedule import Schedule

Stats = dict[str, str | int | float]
"""Flat facts about a solve; keys that end in `_s` are seconds."""

FAILURES = ("solver_error", "search_error")
"""Of `Stats`: why a solver backend, and why a part of the search, failed on the way."""

BoundScope = Literal["slots", "order", "all orders"]
"""For which space a bound is proved: the slots offered (with small values kept throughout, where
`stats` names `reserve_bytes` for them), every schedule of the graph's order, or every schedule at
all."""


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
    def failure(self) -> Stats:
        """What `stats` say of a solver, or a part of the search, that failed on the way."""
        return {key: why for key, why in self.stats.items() if key in FAILURES}
