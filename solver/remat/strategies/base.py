"""What a strategy is, and what it answers.

A strategy is a frozen dataclass whose fields are its options, with one method, `run`. It promises
nothing: `remat.solve` simulates whatever comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from remat.graph import Graph
from remat.progress import Cancel, ProgressCallback
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


@dataclass(frozen=True, slots=True)
class Task:
    """What a strategy is asked for: a schedule of `graph` with a peak of at most `budget_bytes`,
    constant memory included, or with the smallest peak that it can find, where that is None.

    `start` is a schedule that is known to fit, to begin from. `progress` is called with a
    `Progress` now and then; once `cancel` is set, what is known is wanted.
    """

    graph: Graph
    budget_bytes: int | None = None
    start: Schedule | None = None
    progress: ProgressCallback | None = None
    cancel: Cancel | None = None


class Strategy(Protocol):
    """How to look for a schedule within a budget."""

    @property
    def name(self) -> str:
        """As it appears in `Plan.stats`."""
        ...

    def run(self, task: Task) -> Solution:
        """A schedule that does what `task` asks. Raises `InfeasibleBudget` or `SolverTimeout`."""
        ...
