"""`Clock`: the deadline and the cancellation that a search and its steps check."""

from __future__ import annotations

import time
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
