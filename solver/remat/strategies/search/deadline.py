"""When a search stops: at its deadline, if cancelled, or if a solver has stopped improving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from remat.progress import Cancel

_USABLE_SHARE = 0.96
"""Share of the time limit that is planned for. Parts of a solver's presolve cannot be interrupted
and overrun the deadline."""


@dataclass(frozen=True)
class Clock:
    """The time limit of a search or of one step.

    It is over at `deadline` (in seconds of `time.monotonic`) or as soon as one of `cancels` is set.
    """

    deadline: float
    cancels: tuple[Cancel, ...] = ()
    started_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, time_limit: float, cancel: Cancel | None = None) -> Clock:
        """Return a clock that starts now and is over after about `time_limit` seconds."""
        now = time.monotonic()
        return cls(now + _USABLE_SHARE * time_limit, () if cancel is None else (cancel,), now)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock started."""
        return time.monotonic() - self.started_at

    def limited_to(self, seconds: float) -> Clock:
        """Return a clock that starts now and is over after `seconds`, or with this clock if that
        is earlier."""
        now = time.monotonic()
        return Clock(min(self.deadline, now + seconds), self.cancels, now)

    def limited_to_share(self, share: float) -> Clock:
        """Return a clock that starts now and is over after this share of the remaining time."""
        return self.limited_to(share * self.remaining_s)

    def with_cancel(self, cancel: Cancel) -> Clock:
        """Return a clock that starts now and is also over once `cancel` is set."""
        return Clock(self.deadline, (*self.cancels, cancel))

    def is_cancelled(self) -> bool:
        """True if the caller cancelled the search."""
        return any(cancel.is_set() for cancel in self.cancels)

    def is_over(self) -> bool:
        """True if the deadline has passed or the search was cancelled."""
        return self.remaining_s < 0 or self.is_cancelled()


_MIN_GAP_REDUCTION = 0.05


class StallDetector:
    """Watches the incumbent objective and the bound that a solver run reports.

    `is_over` is true once neither has improved for `patience_s` seconds, or once `is_good_enough`
    accepts the best incumbent objective times `unit`. An improvement is a first incumbent, or one
    that closes a twentieth of the gap. Time counts from the first report, and the patience is at
    least as long as that report took to arrive. Each report is passed on to `on_report`.
    """

    def __init__(
        self,
        patience_s: float,
        on_report: Callable[[float | None, float | None], None] = lambda incumbent, bound: None,
        is_good_enough: Callable[[float], bool] = lambda objective: False,
        unit: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        self._on_report = on_report
        self._is_good_enough, self._unit = is_good_enough, unit
        self._started_at = time.monotonic()
        self._improved_at: float | None = None
        self._gap: float | None = None
        self.best_objective = math.inf
        """The lowest incumbent objective reported."""

    def report(self, incumbent: float | None, bound: float | None) -> None:
        """Take the objective of the solver's incumbent and its dual bound; None if unknown."""
        self._on_report(incumbent, bound)
        now = time.monotonic()
        if incumbent is not None:
            self.best_objective = min(self.best_objective, incumbent)
        gap = None if incumbent is None or bound is None else incumbent - bound
        if self._improved_at is None:
            self._patience_s = max(self._patience_s, now - self._started_at)
            self._improved_at = now
        if gap is not None and (self._gap is None or gap < self._gap * (1 - _MIN_GAP_REDUCTION)):
            self._gap = gap
            self._improved_at = now

    def is_over(self) -> bool:
        """True if the solver run is to end now."""
        waited_s = 0.0 if self._improved_at is None else time.monotonic() - self._improved_at
        return waited_s > self._patience_s or self._is_good_enough(self.best_objective * self._unit)
