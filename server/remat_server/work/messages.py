"""What a solving process and its worker tell each other: JSON in frames, never pickle.

To the process: the options of the solve, then the request. From it: progress, and at the end one
of answer (followed by a frame with the gzipped body) and problem.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from remat.documents.base import Record
from remat.service.wire import Kind, Problem, ProgressRecord, Summary


class Task(Record):
    """What to do, before the request itself."""

    kind: Kind
    memory_bytes: int
    niceness: int
    threads: int
    device: str
    """Where to measure, where costs are measured here."""


class Ready(Record):
    """The process has loaded what it needs."""

    message: Literal["ready"] = "ready"


class Advanced(Record):
    """Progress; `is_incumbent` where a better schedule was found."""

    message: Literal["progress"] = "progress"
    progress: ProgressRecord
    is_incumbent: bool


class Answered(Record):
    """Solved; the next frame is the answer's body."""

    message: Literal["answer"] = "answer"
    summary: tuple[Summary, ...]
    is_shared: bool
    """Whether it is the answer for everybody who asks the same: not where costs were measured, as
    another worker's device has others, nor where the solver failed."""


class Failed(Record):
    """Not solved; `status` is infeasible or failed."""

    message: Literal["problem"] = "problem"
    status: Literal["infeasible", "failed"]
    problem: Problem


Message = Annotated[Ready | Advanced | Answered | Failed, Field(discriminator="message")]

MESSAGES: TypeAdapter[Ready | Advanced | Answered | Failed] = TypeAdapter(Message)
"""Reads a frame that a solving process sent."""
