"""What a worker asks of a place to solve in."""

from __future__ import annotations

from typing import Protocol

from remat_server.work.messages import Advanced, Answered, Failed, Task

Said = Advanced | Failed | tuple[Answered, bytes]


class Lost(Exception):
    """The process ended without an answer; the text says what is known."""


class Gone(Lost):
    """The place itself is gone, which is not the job's fault: it is tried again elsewhere."""


class Run(Protocol):
    """One solve under way."""

    def messages(self) -> list[Said]:
        """What it said since the last look; does not wait. Raises `Lost`."""
        ...

    def memory_bytes(self) -> int:
        """What it holds now of what its limit counts, as far as is known."""
        ...

    def kill(self) -> None:
        """End it for good; returns when it is dead."""
        ...


class Placement(Protocol):
    """Starts solves."""

    def start(self, task: Task, request: bytes) -> Run:
        """Begin to solve a gzipped request."""
        ...

    def wait(self, runs: list[Run], timeout_s: float) -> None:
        """Return once one of the runs has something to say, or after the timeout."""
        ...

    def close(self) -> None:
        """End what was kept ready."""
        ...
