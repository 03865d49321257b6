"""Work that Ctrl-C and SIGTERM end early, with what it has found.

Solvers run in C, and Python's signal handlers only in the main thread: so the work is done in
another one while the main thread waits. The first signal sets the work's `cancel`, the second one
leaves at once.
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

from remat.commands.common.exits import Interrupted, Leave, say, word
from remat.errors import RematError
from remat.progress import Cancel

_T = TypeVar("_T")
_LOOK_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ended(Generic[_T]):
    """What the work has made; `signum` is the signal that ended it early, if one did."""

    result: _T
    signum: int | None


@dataclass
class _Stop:
    event: threading.Event = field(default_factory=threading.Event)
    signum: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise Leave(signum)
        self.signum = signum
        self.event.set()
        if sys.stderr.isatty():
            say(f"{word(signum)}: ending with the best so far; once more leaves at once")


def interruptible(work: Callable[[Cancel], _T]) -> Ended[_T]:
    """The work's result. Raises what it raises, or `Interrupted` where a signal ended it before it
    had a result."""
    stop = _Stop()
    results: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work(stop.event))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    with _handling(stop):
        threading.Thread(target=run, name="solve", daemon=True).start()
        while not done.wait(_LOOK_S):  # a wait without a limit would not notice signals everywhere
            pass
    if results:
        return Ended(results[0], stop.signum)
    error = errors[0]
    if stop.signum is not None and isinstance(error, RematError):
        raise Interrupted(
            stop.signum, f"{word(stop.signum)} before any plan was known: nothing is written"
        ) from error
    raise error


@contextmanager
def _handling(stop: _Stop) -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
