"""Jobs as users see them: submit, look, list, cancel, forget. Each function takes a connection."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, func, insert, select, update

from remat.service.wire import ENDED, JobView, Kind, Problem, ProgressRecord, Summary
from remat_server.store.database import now
from remat_server.store.events import append
from remat_server.store.tables import answers, jobs
from remat_server.store.tallies import count


@dataclass(frozen=True, slots=True)
class NewJob:
    """What was asked. `request` is gzipped JSON, `content` its digest."""

    owner: str
    kind: Kind
    content: str
    request: bytes
    model: str = ""
    needs: str = ""
    idempotency_key: str | None = None
    request_id: str = ""


class IdempotencyConflict(Exception):
    """The key was used for another request."""


def by_idempotency_key(connection: Connection, owner: str, key: str, content: str) -> str | None:
    """The id of the job that was made under this key, if any; raises `IdempotencyConflict`."""
    query = select(jobs.c.id, jobs.c.content).where(
        jobs.c.owner == owner, jobs.c.idempotency_key == key
    )
    found = connection.execute(query).first()
    if found is not None and found.content not in (content, own_content(content, found.id)):
        raise IdempotencyConflict(key)
    return None if found is None else found.id


def own_content(content: str, id: str) -> str:
    """What names the answer of one job, where it is not everybody's who asks the same."""
    return hashlib.sha256(f"{content} {id}".encode()).hexdigest()


def submit(connection: Connection, job: NewJob) -> str:
    """Queue a job, or finish it at once where the same was solved before; returns its id.

    Raises IntegrityError where another request with the same idempotency key came first.
    """
    id = secrets.token_hex(16)
    model = job.model or _model_of(connection, job.content)
    used = update(answers).where(answers.c.content == job.content).values(used_at=now())
    is_known = connection.execute(used).rowcount > 0
    connection.execute(
        insert(jobs).values(
            id=id,
            owner=job.owner,
            kind=job.kind,
            status="succeeded" if is_known else "queued",
            model=model,
            content=job.content,
            needs=job.needs,
            request=None if is_known else job.request,
            idempotency_key=job.idempotency_key,
            request_id=job.request_id,
            created_at=now(),
            started_at=now() if is_known else None,
            finished_at=now() if is_known else None,
        )
    )
    append(connection, id, "status", {"status": "succeeded" if is_known else "queued"})
    if is_known:
        append(connection, id, "done", {"status": "succeeded"})
        count(connection, "answered_from_store", kind=job.kind)
    count(connection, "submitted", kind=job.kind)
    return id


def _model_of(connection: Connection, content: str) -> str:
    """The model's name in an earlier job that asked the same: a body that is known is not read."""
    query = select(jobs.c.model).where(jobs.c.content == content).limit(1)
    return connection.execute(query).scalar() or ""


def is_answered(connection: Connection, content: str) -> bool:
    """Whether this very request was accepted and solved before."""
    return connection.execute(select(exists().where(answers.c.content == content))).scalar_one()


def active_count(connection: Connection, owner: str) -> int:
    """How many jobs of an owner are queued or running."""
    query = select(func.count()).where(jobs.c.owner == owner, jobs.c.status.not_in(ENDED))
    return connection.execute(query).scalar_one()


def view(connection: Connection, owner: str, id: str) -> tuple[JobView, int] | None:
    """A job of this owner, and its revision; None where there is none."""
    found = _row(connection, owner, id)
    if found is None:
        return None
    return _view(connection, found, _position(connection, found)), found.revision


def views(
    connection: Connection, owner: str, status: str | None, before: int | None, limit: int
) -> tuple[list[JobView], int | None]:
    """Jobs of an owner, newest first, and where the next page begins."""
    query = select(jobs).where(jobs.c.owner == owner).order_by(jobs.c.number.desc())
    if status is not None:
        query = query.where(jobs.c.status == status)
    if before is not None:
        query = query.where(jobs.c.number < before)
    found = connection.execute(query.limit(limit + 1)).all()
    page = found[:limit]
    more = page[-1].number if len(found) > limit else None
    queued = [row.number for row in page if row.status == "queued"]
    positions = _positions(connection, queued) if queued else {}
    return [_view(connection, row, positions.get(row.number)) for row in page], more


def _positions(connection: Connection, numbers: Sequence[int]) -> dict[int, int]:
    """How many queued jobs are before each of these queued ones; one pass over the queue."""
    rank = func.row_number().over(order_by=jobs.c.number)
    queue = select(jobs.c.number, rank.label("rank")).where(jobs.c.status == "queued").subquery()
    query = select(queue.c.number, queue.c.rank).where(queue.c.number.in_(numbers))
    return {row.number: row.rank - 1 for row in connection.execute(query)}


def is_over(connection: Connection, id: str) -> bool:
    """Whether a job has ended, or was forgotten: no events will come."""
    found = connection.execute(select(jobs.c.status).where(jobs.c.id == id)).scalar()
    return found is None or found in ENDED


def result(connection: Connection, owner: str, id: str) -> tuple[JobView, bytes | None] | None:
    """A job with its gzipped answer, which is None where it has none."""
    found = _row(connection, owner, id)
    if found is None:
        return None
    body = None
    if found.status == "succeeded":
        query = select(answers.c.body).where(answers.c.content == found.content)
        body = connection.execute(query).scalar_one()
    return _view(connection, found, None), body


def cancel(connection: Connection, owner: str, id: str) -> str | None:
    """Cancel a job that has not ended, or forget one that has.

    Returns "cancelled" or "forgotten", or None where there is no such job. The worker of a running
    job sees at its next look that the job is no longer its own.
    """
    found = _row(connection, owner, id, for_update=True)
    if found is None:
        return None
    if found.status in ENDED:
        connection.execute(delete(jobs).where(jobs.c.id == id))
        return "forgotten"
    connection.execute(update(jobs).where(jobs.c.id == id).values(cancelled=True))
    end(connection, id, "cancelled")
    count(connection, "finished", kind=found.kind, status="cancelled")
    return "cancelled"


def end(
    connection: Connection, id: str, status: str, problem: dict[str, Any] | None = None
) -> None:
    """A job has ended: nobody works on it any more, and nobody needs its request."""
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
    if "\0" in id:  # which is no text to PostgreSQL
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
        problem=None if row.problem is None else Problem(**row.problem),
    )


def _summary(connection: Connection, row: Row[Any]) -> tuple[Summary, ...]:
    if row.status != "succeeded":
        return ()
    query = select(answers.c.summary).where(answers.c.content == row.content)
    found: Sequence[dict[str, Any]] = connection.execute(query).scalar_one()
    return tuple(Summary(**each) for each in found)
