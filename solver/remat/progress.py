"""What a running solve tells its caller, and how the caller stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a solve stands.

    `incumbent` and `bound` are overheads (extra time over the time without recomputation) in the
    phase "cost", and peak bytes in the phase "peak"; None where none is known. `gap` is
    (cost - bound) / cost, on total time or on total bytes. `budget_bytes` is None in the phase
    "peak", which looks for the smallest.
    """

    phase: str
    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    budget_bytes: int | None = None


ProgressCallback = Callable[[Progress], None]


class Cancel(Protocol):
    """Anything like `threading.Event`: set it, from any thread, to end the solve early."""

    def is_set(self) -> bool:
        """Whether the solve shall end now with the best it has."""
        ...


@contextmanager
def raise_progress_errors(
    progress: ProgressCallback | None, cancel: Cancel | None
) -> Iterator[tuple[ProgressCallback | None, Cancel | None]]:
    """The two for a solve that the first error of `progress` ends, and that then raises it.

    Solvers call back from code of their own, and what is raised there counts as their failure.
    """
    if progress is None:
        yield None, cancel
        return
    caller = _Caller(progress, cancel)
    try:
        yield caller.tell, caller
    finally:
        if caller.error is not None:
            raise caller.error


class _Caller:
    def __init__(self, progress: ProgressCallback, cancel: Cancel | None) -> None:
        self._progress, self._cancel = progress, cancel
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def tell(self, progress: Progress) -> None:
        with self._lock:  # steps beside each other tell, too
            if self.error is None:
                try:
                    self._progress(progress)
                except BaseException as error:
                    self.error = error

    def is_set(self) -> bool:
        return self.error is not None or (self._cancel is not None and self._cancel.is_set())
