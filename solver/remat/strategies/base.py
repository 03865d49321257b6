"""What a strategy is, and what it answers.

A strategy is a frozen dataclass whose fields are its options, with one method, `run`. It promises
nothing: `remat.solve` simulates whatever comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from remat.graph import Graph
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.solution import Solution


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
