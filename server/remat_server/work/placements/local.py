"""Solves in processes of this machine, one each, with one more kept ready."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import cast

from remat_server.work.linux_process import data_bytes
from remat_server.work.messages import MESSAGES, Answered, Ready, Task
from remat_server.work.placements.interface import Lost, Run, Said

_COMMAND = (sys.executable, "-m", "remat_server.work.child")


class LocalRun:
    """A process, and the connection to it."""

    def __init__(self) -> None:
        """Raises `Lost` where the machine has no room for another process."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise Lost(f"no connection can be made: {error}") from None
        with ours, theirs:
            try:
                self.process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise Lost(f"no process can be started: {error}") from None
            self.connection = Connection(ours.detach())

    def send(self, task: Task, request: bytes) -> None:
        """Hand the task over. Raises `Lost`."""
        try:
            self.connection.send_bytes(task.model_dump_json().encode())
            self.connection.send_bytes(request)
        except OSError:
            raise Lost("the process ended before it had its task") from None

    def messages(self) -> list[Said]:
        """What it said since the last look."""
        said: list[Said] = []
        try:
            while self.connection.poll():
                message = MESSAGES.validate_json(self.connection.recv_bytes())
                match message:
                    case Ready():
                        continue
                    case Answered():
                        said.append((message, self.connection.recv_bytes()))
                    case _:
                        said.append(message)
        except (EOFError, OSError):
            if not said:
                raise Lost(_how_it_ended(self.process)) from None
        return said

    def memory_bytes(self) -> int:
        """Bytes of data, which are what its limit counts."""
        return data_bytes(str(self.process.pid))

    def kill(self) -> None:
        """SIGKILL: a solver does not answer to anything politer."""
        self.process.kill()
        self.process.wait()
        if not self.connection.closed:
            self.connection.close()


class LocalPlacement:
    """Processes here. One waits ready, because loading the solver takes most of a second."""

    def __init__(self) -> None:
        self._spare: LocalRun | None = LocalRun()

    def start(self, task: Task, request: bytes) -> Run:
        """Begin in the process that waits, or in a new one."""
        run, self._spare = self._spare or LocalRun(), None
        try:
            run.send(task, request)
        except Lost:  # whoever ended it, a fresh one may fare better
            run.kill()
            run = LocalRun()
            run.send(task, request)
        with suppress(Lost):  # the next start tries again
            self._spare = LocalRun()
        return run

    def wait(self, runs: list[Run], timeout_s: float) -> None:
        """Return once one of the runs has something to say."""
        connections = [cast(LocalRun, run).connection for run in runs]
        wait(cast(Sequence[Connection], connections), timeout_s)

    def close(self) -> None:
        """End the process that waits."""
        if self._spare is not None:
            self._spare.kill()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "the process closed its connection"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"
