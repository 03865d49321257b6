"""When to end: the one clock that a search and its steps look at."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from remat.progress import Cancel

_USABLE = 0.96
"""Of the time: some steps cannot be interrupted, as parts of the solver's presolve, and overrun."""


@dataclass(frozen=True)
class Clock:
    """Over at `deadline` (of `time.monotonic`), or as soon as one of `cancels` is set."""

    deadline: float
    cancels: tuple[Cancel, ...] = ()
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, time_limit: float, cancel: Cancel | None = None) -> Clock:
        """For a search of about so many seconds from now on."""
        now = time.monotonic()
        return cls(now + _USABLE * time_limit, () if cancel is None else (cancel,), now)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline; below zero after it."""
        return self.deadline - time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def within(self, seconds: float) -> Clock:
        """One that begins now and is over after so many seconds, if not before."""
        now = time.monotonic()
        return Clock(min(self.deadline, now + seconds), self.cancels, now)

    def share(self, share: float) -> Clock:
        """One that begins now and is over after this share of what is left."""
        return self.within(share * self.left_s)

    def unless(self, cancel: Cancel) -> Clock:
        """One that begins now and is over once this is set, if not before."""
        return Clock(self.deadline, (*self.cancels, cancel))

    def is_cancelled(self) -> bool:
        """Whether somebody asked for an end."""
        return any(cancel.is_set() for cancel in self.cancels)

    def is_over(self) -> bool:
        """Whether to end now, with what is known."""
        return self.left_s < 0 or self.is_cancelled()
