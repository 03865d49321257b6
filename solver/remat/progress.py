"""Progress reports of a running solve, its time limit, and how its caller cancels it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

STAGE_PHASE = "stage"
"""The phase of a report that has a new stage, and no figures."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running solve.

    `incumbent` and `bound` are overheads (extra time over the time without recomputation) in the
    phase "cost", and peak bytes in the phase "peak"; None if there is none yet. `gap` is (cost -
    bound) / cost, on total time or on total bytes. `budget_bytes` is None in the phase "peak",
    which searches the smallest. `stage` is the part of a longer answer that the solve is for, as of
    `remat.fit`; a stage that has no solve yet is reported with the phase "stage".
    """

    phase: str
    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    budget_bytes: int | None = None
    stage: str = ""


ProgressCallback = Callable[[Progress], None]


class Cancel(Protocol):
    """Any object like `threading.Event`: set it, from any thread, to end the solve early."""

    def is_set(self) -> bool:
        """True if the solve should end now with the best schedule it has."""
        ...


def is_cancelled(cancel: Cancel | None) -> bool:
    """True if there is a `cancel`, and it is set."""
    return cancel is not None and cancel.is_set()


@dataclass(frozen=True)
class Clock:
    """A time limit. It is a `Cancel` that is set `limit_s` seconds after the start, or as soon as
    one of `cancels` is set."""

    limit_s: float
    cancels: tuple[Cancel, ...] = ()
    started_at: float = field(default_factory=lambda: time.monotonic())

    @classmethod
    def of(cls, limit_s: float, cancel: Cancel | None = None) -> Clock:
        """Return a clock that starts now."""
        return cls(limit_s, () if cancel is None else (cancel,))

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit; negative after it."""
        return self.limit_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at

    def limited_to(self, seconds: float) -> Clock:
        """Return a clock that starts now and is set after `seconds`, or with this clock if that is
        earlier."""
        return Clock(min(self.remaining_s, seconds), self.cancels)

    def limited_to_share(self, share: float) -> Clock:
        """Return a clock that starts now and is set after this share of the remaining time, or when
        this clock is cancelled."""
        return self.limited_to(share * self.remaining_s)

    def with_cancel(self, cancel: Cancel) -> Clock:
        """Return a clock that starts now and is also set once `cancel` is set."""
        return Clock(self.remaining_s, (*self.cancels, cancel))

    def without_limit(self) -> Clock:
        """Return a clock that only a cancellation sets: a solve that starts after the time limit
        takes the first schedule, and is not cancelled."""
        return Clock(math.inf, self.cancels)

    def is_cancelled(self) -> bool:
        """True if one of `cancels` is set."""
        return any(cancel.is_set() for cancel in self.cancels)

    def is_set(self) -> bool:
        """True after the time limit, or if the clock is cancelled."""
        return self.remaining_s <= 0 or self.is_cancelled()


@contextmanager
def raise_progress_errors(
    progress: ProgressCallback | None, cancel: Cancel | None
) -> Iterator[tuple[ProgressCallback | None, Cancel | None]]:
    """Yield guarded versions of the two: the first error of `progress` cancels the solve, and is
    raised when the context ends. Without `progress`, yield both unchanged.

    Solvers run callbacks from their own code, and treat errors in them as their own failure.
    """
    if progress is None:
        yield None, cancel
        return
    guarded = _GuardedCallbacks(progress, cancel)
    try:
        yield guarded.report, guarded
    finally:
        guarded.raise_error()


class _GuardedCallbacks:
    """A progress callback and a cancel that record the first error of the caller's callback."""

    def __init__(self, progress: ProgressCallback, cancel: Cancel | None) -> None:
        self._progress, self._cancel = progress, cancel
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def report(self, progress: Progress) -> None:
        with self._lock:  # concurrent steps report, too
            if self.error is None:
                try:
                    self._progress(progress)
                except BaseException as error:
                    self.error = error

    def raise_error(self) -> None:
        """Raise the recorded error, if there is one, and forget it: its traceback has the caller's
        frame, which references this object."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def is_set(self) -> bool:
        return self.error is not None or is_cancelled(self._cancel)
