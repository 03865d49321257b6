"""Jobs from the user's view: submit, view, list, cancel and delete, on a connection to the
store."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, func, insert, select, update

from remat.service.wire import (
    ENDED_STATES,
    JobKind,
    JobView,
    PlanSummary,
    ProblemDetails,
    ProgressRecord,
)
from remat_server.store.database import now
from remat_server.store.events import append
from remat_server.store.tables import answers, jobs
from remat_server.store.tallies import count


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. `request` is gzipped JSON, and `content` its digest."""

    owner: str
    kind: JobKind
    content: str
    request: bytes
    model: str = ""
    needs: str = ""
    idempotency_key: str | None = None
    request_id: str = ""


class IdempotencyConflict(Exception):
    """The idempotency key was used for another request."""


def by_idempotency_key(connection: Connection, owner: str, key: str, content: str) -> str | None:
    """Return the id of the owner's job with this idempotency key; None if there is none.

    Raises `IdempotencyConflict` if that job is for another request.
    """
    query = select(jobs.c.id, jobs.c.content).where(
        jobs.c.owner == owner, jobs.c.idempotency_key == key
    )
    row = connection.execute(query).first()
    if row is not None and row.content not in (content, unshared_content(content, row.id)):
        raise IdempotencyConflict(key)
    return None if row is None else row.id


def unshared_content(content: str, id: str) -> str:
    """Return the key of an answer that belongs to one job only, not to all jobs with the same
    request."""
    return hashlib.sha256(f"{content} {id}".encode()).hexdigest()


def submit(connection: Connection, job: NewJob) -> str:
    """Queue a job, or finish it immediately if the store has the answer; return its id.

    Raises `IntegrityError` if a concurrent request with the same idempotency key was first.
    """
    id = secrets.token_hex(16)
    model = job.model or _model_of(connection, job.content)
    mark_used = update(answers).where(answers.c.content == job.content).values(used_at=now())
    has_answer = connection.execute(mark_used).rowcount > 0
    connection.execute(
        insert(jobs).values(
            id=id,
            owner=job.owner,
            kind=job.kind,
            status="succeeded" if has_answer else "queued",
            model=model,
            content=job.content,
            needs=job.needs,
            request=None if has_answer else job.request,
            idempotency_key=job.idempotency_key,
            request_id=job.request_id,
            created_at=now(),
            started_at=now() if has_answer else None,
            finished_at=now() if has_answer else None,
        )
    )
    append(connection, id, "status", {"status": "succeeded" if has_answer else "queued"})
    if has_answer:
        append(connection, id, "done", {"status": "succeeded"})
        count(connection, "answered_from_store", kind=job.kind)
    count(connection, "submitted", kind=job.kind)
    return id


def _model_of(connection: Connection, content: str) -> str:
    """Return the model's name from an earlier job with the same request, which was not parsed
    now."""
    query = select(jobs.c.model).where(jobs.c.content == content).limit(1)
    return connection.execute(query).scalar() or ""


def is_answered(connection: Connection, content: str) -> bool:
    """True if the store has an answer to this request."""
    return connection.execute(select(exists().where(answers.c.content == content))).scalar_one()


def active_count(connection: Connection, owner: str) -> int:
    """Return the number of an owner's jobs that are queued or running."""
    query = select(func.count()).where(jobs.c.owner == owner, jobs.c.status.not_in(ENDED_STATES))
    return connection.execute(query).scalar_one()


def view(connection: Connection, owner: str, id: str) -> tuple[JobView, int] | None:
    """Return a job of this owner and its revision; None if there is no such job."""
    row = _row(connection, owner, id)
    if row is None:
        return None
    return _view(connection, row, _position(connection, row)), row.revision


def list_views(
    connection: Connection, owner: str, status: str | None, before: int | None, limit: int
) -> tuple[list[JobView], int | None]:
    """Return a page of an owner's jobs, newest first, and the cursor of the next page (None:
    last)."""
    query = select(jobs).where(jobs.c.owner == owner).order_by(jobs.c.number.desc())
    if status is not None:
        query = query.where(jobs.c.status == status)
    if before is not None:
        query = query.where(jobs.c.number < before)
    rows = connection.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    next_cursor = page[-1].number if len(rows) > limit else None
    queued = [row.number for row in page if row.status == "queued"]
    positions = _positions(connection, queued) if queued else {}
    return [_view(connection, row, positions.get(row.number)) for row in page], next_cursor


def _positions(connection: Connection, numbers: Sequence[int]) -> dict[int, int]:
    """Return the number of queued jobs before each of these queued jobs, in one pass over the
    queue."""
    rank = func.row_number().over(order_by=jobs.c.number)
    queue = select(jobs.c.number, rank.label("rank")).where(jobs.c.status == "queued").subquery()
    query = select(queue.c.number, queue.c.rank).where(queue.c.number.in_(numbers))
    return {row.number: row.rank - 1 for row in connection.execute(query)}


def is_over(connection: Connection, id: str) -> bool:
    """True if a job has ended or was deleted, so that there will be no more events."""
    status = connection.execute(select(jobs.c.status).where(jobs.c.id == id)).scalar()
    return status is None or status in ENDED_STATES


def result(connection: Connection, owner: str, id: str) -> tuple[JobView, bytes | None] | None:
    """Return a job with its gzipped answer, which is None unless the job succeeded."""
    row = _row(connection, owner, id)
    if row is None:
        return None
    body = None
    if row.status == "succeeded":
        query = select(answers.c.body).where(answers.c.content == row.content)
        body = connection.execute(query).scalar_one()
    return _view(connection, row, None), body


def cancel_or_delete(connection: Connection, owner: str, id: str) -> str | None:
    """Cancel a job that has not ended, or delete one that has.

    Return "cancelled" or "deleted", or None if there is no such job. The worker of a running job
    notices at its next poll that it does not own the job any more.
    """
    row = _row(connection, owner, id, for_update=True)
    if row is None:
        return None
    if row.status in ENDED_STATES:
        connection.execute(delete(jobs).where(jobs.c.id == id))
        return "deleted"
    connection.execute(update(jobs).where(jobs.c.id == id).values(cancelled=True))
    end(connection, id, "cancelled")
    count(connection, "finished", kind=row.kind, status="cancelled")
    return "cancelled"


def end(
    connection: Connection, id: str, status: str, problem: dict[str, Any] | None = None
) -> None:
    """Set a job's final status, and delete its lease and its request."""
    connection.execute(
        update(jobs)
        .where(jobs.c.id == id)
        .values(
            status=status,
            problem=problem,
            finished_at=now(),
            worker=None,
            lease_until=None,
            request=None,
            revision=jobs.c.revision + 1,
        )
    )
    append(connection, id, "status", {"status": status})
    append(connection, id, "done", {"status": status})


def _row(
    connection: Connection, owner: str, id: str, *, for_update: bool = False
) -> Row[Any] | None:
    if "\0" in id:  # PostgreSQL refuses NUL in text
        return None
    query = select(jobs).where(jobs.c.id == id, jobs.c.owner == owner)
    return connection.execute(query.with_for_update() if for_update else query).first()


def _position(connection: Connection, row: Row[Any]) -> int | None:
    if row.status != "queued":
        return None
    before = select(func.count()).where(jobs.c.status == "queued", jobs.c.number < row.number)
    return connection.execute(before).scalar_one()


def _view(connection: Connection, row: Row[Any], position: int | None) -> JobView:
    return JobView(
        id=row.id,
        kind=row.kind,
        status=row.status,
        model=row.model,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        position=position,
        progress=None if row.progress is None else ProgressRecord(**row.progress),
        summary=_summary(connection, row),
        problem=None if row.problem is None else ProblemDetails(**row.problem),
    )


def _summary(connection: Connection, row: Row[Any]) -> tuple[PlanSummary, ...]:
    if row.status != "succeeded":
        return ()
    query = select(answers.c.summary).where(answers.c.content == row.content)
    summaries: Sequence[dict[str, Any]] = connection.execute(query).scalar_one()
    return tuple(PlanSummary(**summary) for summary in summaries)
