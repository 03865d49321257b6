"""Ending the commands that PuLP runs: it waits for them in C and lends out no handle of theirs.

On Linux, where the kernel tells which processes a thread has started. Elsewhere they end with their
time limit, or by the terminal's Ctrl-C, which reaches them too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_S = 0.1
_PATIENCE_S = 2.0
"""A command that is interrupted may write what it has found; after this it is killed."""


@contextmanager
def ended_once(is_over: Callable[[], bool] | None) -> Iterator[None]:
    """Within, commands that this thread starts are interrupted once `is_over`, and killed where
    they go on."""
    if is_over is None:
        yield
        return
    left = threading.Event()
    caller = threading.get_native_id()
    watcher = threading.Thread(
        target=_watch, args=(is_over, left, caller, set(_started_by(caller))), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


def kill_all() -> None:
    """Kill every process that this one has started, and what those have: for leaving at once."""
    for pid in _descendants(_children(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _watch(
    is_over: Callable[[], bool], left: threading.Event, caller: int, others: set[int]
) -> None:
    until: float | None = None
    while not left.wait(_LOOK_S):
        if not is_over():
            continue
        first = until is None
        until = time.monotonic() + _PATIENCE_S if until is None else until
        for pid in _descendants(set(_started_by(caller)) - others):
            with suppress(ProcessLookupError):
                if first:
                    os.kill(pid, signal.SIGINT)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)


def _descendants(pids: set[int]) -> list[int]:
    found: list[int] = []
    ahead = sorted(pids)
    while ahead:
        found.append(ahead.pop())
        ahead += _children(found[-1])
    return found


def _children(pid: int) -> set[int]:
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        return {child for task in tasks for child in _started_by(int(task), pid)}
    return set()


def _started_by(thread: int, pid: int | None = None) -> list[int]:
    owner = "self" if pid is None else str(pid)
    with suppress(OSError):
        text = Path(f"/proc/{owner}/task/{thread}/children").read_text()
        return [int(word) for word in text.split()]
    return []
