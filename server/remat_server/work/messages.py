"""Messages between a worker and a solving process, as frames of JSON, not pickle.

The worker sends a `SolveTask`, then the request. The process sends a `ReadyMessage`, progress, and
at the end an `AnswerMessage` (followed by a frame with the gzipped body) or a `FailureMessage`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from remat.documents.base import Record
from remat.service.wire import JobKind, PlanSummary, ProblemDetails, ProgressRecord


class SolveTask(Record):
    """Options of a solve; the request is the next frame."""

    kind: JobKind
    memory_bytes: int
    niceness: int
    threads: int
    time_limit_s: float
    device: str
    """Device type to measure on, if the service measures the costs, else ""."""


class ReadyMessage(Record):
    """The process has loaded the solver."""

    message: Literal["ready"] = "ready"


class ProgressMessage(Record):
    """Progress of the solve; `is_incumbent` is True if there is a better schedule."""

    message: Literal["progress"] = "progress"
    progress: ProgressRecord
    is_incumbent: bool


class AnswerMessage(Record):
    """The solve succeeded; the next frame is the gzipped answer."""

    message: Literal["answer"] = "answer"
    summary: tuple[PlanSummary, ...]
    is_shared: bool
    """True if the answer is valid for all jobs with the same request. False if the costs were
    measured, since the device of another worker has other costs, and if the solver failed."""


class FailureMessage(Record):
    """The solve did not succeed: it is infeasible, or it failed."""

    message: Literal["problem"] = "problem"
    status: Literal["infeasible", "failed"]
    problem: ProblemDetails


Message = Annotated[
    ReadyMessage | ProgressMessage | AnswerMessage | FailureMessage, Field(discriminator="message")
]

MESSAGES: TypeAdapter[ReadyMessage | ProgressMessage | AnswerMessage | FailureMessage] = (
    TypeAdapter(Message)
)
"""Parses a frame from a solving process."""
