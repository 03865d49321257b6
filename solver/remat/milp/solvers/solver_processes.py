"""Interrupting the solver commands that PuLP starts: it waits for them in C and exposes no handle.

This works on Linux, where the kernel lists the processes that a thread has started. Elsewhere they
end at their time limit, or by Ctrl-C in the terminal, which reaches them too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_INTERVAL_S = 0.1
_KILL_DELAY_S = 2.0
"""Seconds that an interrupted command has for writing its solution before it is killed."""


@contextmanager
def interrupt_commands_when(is_over: Callable[[], bool] | None) -> Iterator[None]:
    """Interrupt the commands that this thread starts inside the context once `is_over` returns
    True, and kill those that go on."""
    if is_over is None:
        yield
        return
    finished = threading.Event()
    caller = threading.get_native_id()
    watcher = threading.Thread(
        target=_interrupt_started_processes,
        args=(is_over, finished, caller, set(_processes_started_by(caller))),
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def kill_child_processes() -> None:
    """Kill every process that this one has started, and their children. For a process that is about
    to exit at once. Does nothing unless on Linux."""
    for pid in _descendant_processes(_child_processes(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _interrupt_started_processes(
    is_over: Callable[[], bool], finished: threading.Event, caller: int, earlier_pids: set[int]
) -> None:
    """Wait until `is_over` returns True, then interrupt and later kill what the thread `caller` has
    started, except `earlier_pids`; until `finished` is set."""
    kill_at: float | None = None
    while not finished.wait(_POLL_INTERVAL_S):
        if not is_over():
            continue
        is_first = kill_at is None
        kill_at = time.monotonic() + _KILL_DELAY_S if kill_at is None else kill_at
        for pid in _descendant_processes(set(_processes_started_by(caller)) - earlier_pids):
            with suppress(ProcessLookupError):
                if is_first:
                    os.kill(pid, signal.SIGINT)
                elif time.monotonic() > kill_at:
                    os.kill(pid, signal.SIGKILL)


def _descendant_processes(pids: set[int]) -> list[int]:
    """Return these processes and all that they have started, directly or not."""
    descendants: list[int] = []
    pending = sorted(pids)
    while pending:
        descendants.append(pending.pop())
        pending += _child_processes(descendants[-1])
    return descendants


def _child_processes(pid: int) -> set[int]:
    """Return the processes that a process has started; none where there is no /proc."""
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        return {child for task in tasks for child in _processes_started_by(int(task), pid)}
    return set()


def _processes_started_by(thread: int, pid: int | None = None) -> list[int]:
    """Return the processes that a thread of a process (by default this one) has started; none where
    there is no /proc."""
    owner = "self" if pid is None else str(pid)
    with suppress(OSError):
        text = Path(f"/proc/{owner}/task/{thread}/children").read_text()
        return [int(word) for word in text.split()]
    return []
