"""Protocols for the place where solving processes run."""

from __future__ import annotations

from typing import Protocol

from remat_server.work.messages import AnswerMessage, FailureMessage, ProgressMessage, SolveTask

SolveMessage = ProgressMessage | FailureMessage | tuple[AnswerMessage, bytes]


class SolveLost(Exception):
    """The solving process ended without an answer; the message says how."""


class NodeLost(SolveLost):
    """The node of the solving process was lost. The job is not the cause, and is queued again."""


class RunningSolve(Protocol):
    """One solve that is running."""

    def messages(self) -> list[SolveMessage]:
        """Return the messages since the last call, without waiting. Raises `SolveLost`."""
        ...

    def memory_bytes(self) -> int:
        """Return the bytes that count against the memory limit now, as far as known."""
        ...

    def kill(self) -> None:
        """Kill the solving process; return when it has ended."""
        ...


class Placement(Protocol):
    """Starts solving processes."""

    def start(self, task: SolveTask, request: bytes) -> RunningSolve:
        """Start to solve a gzipped request. Raises `SolveLost`."""
        ...

    def wait(self, runs: list[RunningSolve], timeout_s: float) -> None:
        """Wait until one of the solves has a message, or for the timeout."""
        ...

    def close(self) -> None:
        """End processes in reserve, and release the placement's resources."""
        ...
