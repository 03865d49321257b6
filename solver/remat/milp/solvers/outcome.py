"""How a solver run ended, in the same words for every solver."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a solver run ended."""

    OPTIMAL = "within the gap that was asked for"
    FEASIBLE = "stopped early with a solution"
    INFEASIBLE = "proved that there is no solution over these slots"
    UNKNOWN = "stopped early without a solution"
