"""Real CBC processes, killed at chosen moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from remat.milp.solvers.solver_processes import _child_processes, _descendant_processes

needs_procfs = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs /proc to find the solver's process"
)


@dataclass
class Kills:
    """The CBC processes that were killed, and the number of those that had not read their
    problem yet."""

    pids: list[int] = field(default_factory=list[int])
    unread: int = 0


@contextmanager
def killing_cbc(when: Callable[[int], bool], owner: int | None = None) -> Iterator[Kills]:
    """In this block, kill every CBC process that descends from `owner` (by default, this
    process) as soon as `when` is true for it."""
    kills = Kills()
    ended = threading.Event()
    root = os.getpid() if owner is None else owner

    def watch() -> None:
        while not ended.is_set():
            pids = [pid for pid in _descendant_processes(_child_processes(root)) if arguments(pid)]
            for pid in pids:
                with suppress(OSError):  # it has ended
                    while pid not in kills.pids and arguments(pid) and not ended.is_set():
                        if when(pid):
                            kill(pid, kills)
            time.sleep(0 if pids else 0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield kills
    finally:
        ended.set()
        watcher.join()


def kill(pid: int, kills: Kills) -> None:
    os.kill(pid, signal.SIGSTOP)
    if not (words := arguments(pid)):
        return  # it has just ended
    with suppress(OSError):
        counters = dict(
            line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines()
        )
        kills.unread += int(counters["rchar"]) < Path(words[1]).stat().st_size
    os.kill(pid, signal.SIGKILL)
    kills.pids.append(pid)


def arguments(pid: int) -> list[str]:
    """Return the arguments of a CBC process as PuLP starts it: the command, the problem's file,
    ...; none for another process."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return words if "-solution" in words else []
    return []


def at_once(pid: int) -> bool:
    """True as soon as the process is seen: before it has read its problem, except on a busy
    machine."""
    return True


def while_solving(pid: int) -> bool:
    """True after a fifth of a second of work."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 0.2


def once_solution_is_written(pid: int) -> bool:
    """True when the file with its solution exists.

    Until then the process is stepped slowly, or it would end before it is looked at.
    """
    words = arguments(pid)
    if not words:
        return False
    os.kill(pid, signal.SIGSTOP)
    if os.path.exists(words[words.index("-solution") + 1]):
        return True
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    os.kill(pid, signal.SIGCONT)
    time.sleep(_STEP_S)
    return False


_STEP_S = 2e-4
