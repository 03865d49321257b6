"""When a solver run has come far enough, or has stopped getting anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_ENOUGH = 0.05


class Stall:
    """Watches a run's incumbent and bound; `is_over` once neither has moved for long, or once
    `enough` is true of the best incumbent, times `unit`.

    A move is one that takes away a twentieth of the gap, or is the first incumbent. The clock
    begins with the first report, and waits for at least as long as that took to come.
    """

    def __init__(
        self,
        patience_s: float,
        then: Callable[[float | None, float | None], None] = lambda incumbent, bound: None,
        enough: Callable[[float], bool] = lambda least: False,
        unit: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        self._then = then
        self._enough, self._unit = enough, unit
        self._began = time.monotonic()
        self._moved_at: float | None = None
        self._gap: float | None = None
        self.least = math.inf
        """The best incumbent reported."""

    def report(self, incumbent: float | None, bound: float | None) -> None:
        """What the solver has now."""
        self._then(incumbent, bound)
        now = time.monotonic()
        if incumbent is not None:
            self.least = min(self.least, incumbent)
        gap = None if incumbent is None or bound is None else incumbent - bound
        if self._moved_at is None:
            self._patience_s = max(self._patience_s, now - self._began)
            self._moved_at = now
        if gap is not None and (self._gap is None or gap < self._gap * (1 - _ENOUGH)):
            self._gap = gap
            self._moved_at = now

    def is_over(self) -> bool:
        """Whether to end the run."""
        waited_s = 0.0 if self._moved_at is None else time.monotonic() - self._moved_at
        return waited_s > self._patience_s or self._enough(self.least * self._unit)
