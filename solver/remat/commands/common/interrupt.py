"""Runs work that Ctrl-C and SIGTERM end early, with its best result so far.

Solvers run in C, and Python's signal handlers run only in the main thread. So the work runs in
another thread while the main thread waits. The first signal sets the work's `cancel`, the second
one exits immediately.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Generic, TypeVar

from remat.commands.common.exits import (
    ImmediateExit,
    InterruptedWithoutResult,
    describe_signal,
    print_message,
)
from remat.errors import RematError
from remat.progress import Cancel

_T = TypeVar("_T")
_POLL_INTERVAL_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Outcome(Generic[_T]):
    """The result of interruptible work; `signum` is the signal that ended it early, if any."""

    result: _T
    signum: int | None


@dataclass
class _CancelOnSignal:
    """Signal handler: the first signal sets `event`, the second one exits."""

    event: threading.Event = field(default_factory=threading.Event)
    signum: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise ImmediateExit(signum)
        self.signum = signum
        self.event.set()
        if sys.stderr.isatty():
            print_message(
                f"{describe_signal(signum)}: stopping with the best plan so far; interrupt once "
                "more to exit immediately"
            )


def run_interruptibly(work: Callable[[Cancel], _T]) -> Outcome[_T]:
    """Run work in a thread until it ends or a signal cancels it.

    Raises the work's exception, or `InterruptedWithoutResult` if a signal ended it before it had a
    result.
    """
    handler = _CancelOnSignal()
    results: list[_T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            results.append(work(handler.event))
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    with _signals_handled_by(handler):
        threading.Thread(target=run, name="solve", daemon=True).start()
        # On some systems, a wait without a timeout does not notice signals.
        while not finished.wait(_POLL_INTERVAL_S):
            pass
    if results:
        return Outcome(results[0], handler.signum)
    error = errors[0]
    if handler.signum is not None and isinstance(error, RematError):
        raise InterruptedWithoutResult(
            handler.signum,
            f"{describe_signal(handler.signum)} before a plan was found; nothing was written",
        ) from error
    raise error


@contextmanager
def _signals_handled_by(new_handler: _CancelOnSignal) -> Iterator[None]:
    previous_handlers = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum, handler in previous_handlers.items():
        if handler != signal.SIG_IGN:  # ignored under nohup
            signal.signal(signum, new_handler)
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
