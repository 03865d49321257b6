"""Solving processes on this machine, one per solve, with another one in reserve."""

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
from remat_server.work.messages import MESSAGES, AnswerMessage, ReadyMessage, SolveTask
from remat_server.work.placements.interface import RunningSolve, SolveLost, SolveMessage

_COMMAND = (sys.executable, "-m", "remat_server.work.child")


class LocalSolve:
    """A solving process, and the connection to it."""

    def __init__(self) -> None:
        """Start the process. Raises `SolveLost` if the machine cannot start another one."""
        try:
            parent_socket, child_socket = socket.socketpair()
        except OSError as error:
            raise SolveLost(f"no socket can be created: {error}") from None
        with parent_socket, child_socket:
            try:
                self.process = subprocess.Popen(
                    [*_COMMAND, str(child_socket.fileno()), str(os.getpid())],
                    pass_fds=[child_socket.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise SolveLost(f"no process can be started: {error}") from None
            self.connection = Connection(parent_socket.detach())

    def send(self, task: SolveTask, request: bytes) -> None:
        """Send the task and the request. Raises `SolveLost`."""
        try:
            self.connection.send_bytes(task.model_dump_json().encode())
            self.connection.send_bytes(request)
        except OSError:
            raise SolveLost("the process ended before it received its task") from None

    def messages(self) -> list[SolveMessage]:
        """Return the messages since the last call. Raises `SolveLost`."""
        messages: list[SolveMessage] = []
        try:
            while self.connection.poll():
                message = MESSAGES.validate_json(self.connection.recv_bytes())
                match message:
                    case ReadyMessage():
                        continue
                    case AnswerMessage():
                        messages.append((message, self.connection.recv_bytes()))
                    case _:
                        messages.append(message)
        except (EOFError, OSError):
            if not messages:
                raise SolveLost(_describe_end(self.process)) from None
        return messages

    def memory_bytes(self) -> int:
        """Return the bytes of the process's data, which count against its limit."""
        return data_bytes(str(self.process.pid))

    def kill(self) -> None:
        """Kill the process with SIGKILL: a solver does not react to other signals."""
        self.process.kill()
        self.process.wait()
        if not self.connection.closed:
            self.connection.close()


class LocalPlacement:
    """Processes on this machine. One is in reserve, because loading the solver takes most of a
    second."""

    def __init__(self) -> None:
        self._spare: LocalSolve | None = LocalSolve()

    def start(self, task: SolveTask, request: bytes) -> RunningSolve:
        """Solve in the process in reserve, or in a new one. Raises `SolveLost`."""
        run, self._spare = self._spare or LocalSolve(), None
        try:
            run.send(task, request)
        except SolveLost:  # a new process may succeed
            run.kill()
            run = LocalSolve()
            run.send(task, request)
        with suppress(SolveLost):  # the next start retries
            self._spare = LocalSolve()
        return run

    def wait(self, runs: list[RunningSolve], timeout_s: float) -> None:
        """Wait until one of the solves has a message, or for the timeout."""
        connections = [cast(LocalSolve, run).connection for run in runs]
        wait(cast(Sequence[Connection], connections), timeout_s)

    def close(self) -> None:
        """End the process in reserve."""
        if self._spare is not None:
            self._spare.kill()


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "the process closed its connection"
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process exited with code {code}"
