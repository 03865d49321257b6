"""`SolverRun`: how a solver run ended, in the same terms for every solver."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from remat.schedule import Schedule


class SolverOutcome(Enum):
    """How a solver run ended."""

    OPTIMAL = "within the requested gap"
    FEASIBLE = "stopped early with a solution"
    INFEASIBLE = "proved that there is no solution over these slots"
    UNKNOWN = "stopped early without a solution"


@dataclass(frozen=True, slots=True)
class SolverRun:
    """A solver's answer.

    `objective` and `bound` are in the program's units, None where unknown. `schedule` is the
    solution as a schedule, where the program has one.
    """

    outcome: SolverOutcome
    schedule: Schedule | None
    objective: float | None
    bound: float | None
    nodes: int
    seconds: float
    message: str
