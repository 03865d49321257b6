"""`Deadline`: the time limit of one answer, which all of its solves share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from remat.strategies.base import Strategy, with_limits

_LEAST_LIMIT_S = 0.1
"""Strategies need a time limit above 0."""


@dataclass(frozen=True)
class Deadline:
    """The time limit of an answer; `remat.solve` takes it as its `cancel`."""

    limit_s: float = math.inf
    started_at_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit; 0 after it."""
        return max(0.0, self.limit_s - self.elapsed_s)

    def is_set(self) -> bool:
        """True after the time limit."""
        return self.remaining_s <= 0.0

    def shortened(self, strategy: Strategy) -> Strategy:
        """Return the strategy with a time limit of at most the remaining time, if it has one."""
        return with_limits(strategy, time_limit=max(_LEAST_LIMIT_S, self.remaining_s))
