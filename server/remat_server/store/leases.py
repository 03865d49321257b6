"""Jobs from the worker's view: claim, renew, report, finish and release.

A worker owns a job by a lease, which it renews. If the lease expires, another worker may claim the
job: a solve has no side effects, so solving twice is harmless, and only the owner of the lease can
finish the job. A job that is not running has no worker and no lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, exists, func, or_, select, update

from remat.service.wire import JobKind
from remat_server.store.database import now, upsert_into
from remat_server.store.events import append
from remat_server.store.jobs import end, is_answered, unshared_content
from remat_server.store.tables import answers, jobs, workers
from remat_server.store.tallies import GAPS, SECONDS, count, observe

IS_FREE = or_(
    jobs.c.status == "queued", and_(jobs.c.status == "running", jobs.c.lease_until < now())
)
"""SQL condition: the job is queued, or its worker is lost. PostgreSQL evaluates the condition a
second time once the job's row is locked, but not conditions on other rows."""


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that a worker has claimed."""

    id: str
    kind: JobKind
    request: bytes
    request_id: str
    attempts: int
    needs: str


def claim(
    connection: Connection, worker: str, devices: Sequence[str], lease_s: float
) -> ClaimedJob | None:
    """Claim the oldest job that is queued or lost by its worker and needs none but these devices.

    Return None if there is none. While a job is being solved, other jobs with the same request wait
    for its answer.
    """
    while True:
        query = _next(devices).with_for_update(skip_locked=True)
        row = connection.execute(query).first()
        if row is None:
            return None
        if is_answered(connection, row.content):
            _answer_from_store(connection, row)
            continue
        claimed = update(jobs).where(jobs.c.id == row.id)
        connection.execute(
            claimed.values(
                status="running",
                worker=worker,
                lease_until=now() + lease_s,
                started_at=now(),
                attempts=jobs.c.attempts + 1,
                progress=None,
                revision=jobs.c.revision + 1,
            )
        )
        append(connection, row.id, "status", {"status": "running"})
        return ClaimedJob(
            id=row.id,
            kind=row.kind,
            request=row.request,
            request_id=row.request_id,
            attempts=row.attempts + 1,
            needs=row.needs,
        )


def has_claimable_job(connection: Connection, devices: Sequence[str]) -> bool:
    """True if `claim` would probably return a job. Only reads."""
    return connection.execute(_next(devices)).first() is not None


def _next(devices: Sequence[str]) -> Select[Any]:
    other = jobs.alias()
    is_being_solved = exists().where(
        other.c.content == jobs.c.content,
        other.c.status == "running",
        other.c.lease_until >= now(),
    )
    return (
        select(jobs)
        .where(IS_FREE, jobs.c.needs.in_(["", *devices]), ~is_being_solved)
        .order_by(jobs.c.number)
        .limit(1)
    )


def _answer_from_store(connection: Connection, job: Any) -> None:
    end(connection, job.id, "succeeded")
    count(connection, "answered_from_store", kind=job.kind)


def renew(connection: Connection, worker: str, ids: Sequence[str], lease_s: float) -> set[str]:
    """Renew a worker's leases; return the jobs that it still owns."""
    renewed = (
        update(jobs)
        .where(jobs.c.id.in_(ids), jobs.c.worker == worker)
        .values(lease_until=now() + lease_s)
        .returning(jobs.c.id)
    )
    return {row.id for row in connection.execute(renewed)}


def owned_jobs(connection: Connection, worker: str, ids: Sequence[str]) -> set[str]:
    """Return those of the jobs that the worker still owns. Nothing owns a cancelled job."""
    query = select(jobs.c.id).where(jobs.c.id.in_(ids), jobs.c.worker == worker)
    return {row.id for row in connection.execute(query)}


def report(
    connection: Connection, worker: str, id: str, progress: dict[str, Any], is_incumbent: bool
) -> None:
    """Store the progress of a job; do nothing if the worker does not own it any more."""
    updated = (
        update(jobs)
        .where(jobs.c.id == id, jobs.c.worker == worker)
        .values(progress=progress, revision=jobs.c.revision + 1)
    )
    if connection.execute(updated).rowcount:
        append(connection, id, "incumbent" if is_incumbent else "progress", progress)


def finish(
    connection: Connection,
    worker: str,
    id: str,
    status: str,
    *,
    body: bytes | None = None,
    summary: Sequence[dict[str, Any]] = (),
    is_shared: bool = True,
    problem: dict[str, Any] | None = None,
    seconds: float,
) -> bool:
    """Finish a job with its answer or its problem; return False if the worker does not own it.

    An answer that is not shared belongs to this job only: other jobs with the same request are
    solved separately.
    """
    query = select(jobs.c.content, jobs.c.kind).where(jobs.c.id == id, jobs.c.worker == worker)
    row = connection.execute(query.with_for_update()).first()
    if row is None:
        return False
    if body is not None:
        content = row.content if is_shared else unshared_content(row.content, id)
        connection.execute(update(jobs).where(jobs.c.id == id).values(content=content))
        statement = upsert_into(connection, answers).values(
            content=content, body=body, summary=list(summary), used_at=now()
        )
        connection.execute(statement.on_conflict_do_nothing(index_elements=["content"]))
    end(connection, id, status, problem)
    count(connection, "finished", kind=row.kind, status=status)
    observe(connection, "solve_seconds", seconds, SECONDS)
    for plan in summary:
        if plan["gap"] is not None:
            observe(connection, "gap", plan["gap"], GAPS)
    return True


def release(
    connection: Connection, worker: str, ids: Sequence[str], *, counts_as_attempt: bool = False
) -> None:
    """Put jobs that the worker will not finish back into the queue. By default, this does not count
    as an attempt."""
    released = (
        update(jobs)
        .where(jobs.c.id.in_(ids), jobs.c.worker == worker)
        .values(
            status="queued",
            worker=None,
            lease_until=None,
            attempts=jobs.c.attempts - (0 if counts_as_attempt else 1),
            revision=jobs.c.revision + 1,
        )
        .returning(jobs.c.id)
    )
    for row in connection.execute(released).all():
        append(connection, row.id, "status", {"status": "queued"})


def register_worker(connection: Connection, name: str, devices: Sequence[str], slots: int) -> None:
    """Record that a worker is alive, with its device types and its number of concurrent solves."""
    statement = upsert_into(connection, workers).values(
        name=name, devices=list(devices), slots=slots, seen_at=now()
    )
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"],
            set_={"devices": statement.excluded.devices, "slots": slots, "seen_at": now()},
        )
    )


def unregister_worker(connection: Connection, name: str) -> None:
    """Delete the record of a worker that ends."""
    connection.execute(delete(workers).where(workers.c.name == name))


def available_devices(connection: Connection, lease_s: float) -> set[str]:
    """Return the device types on which a worker that is alive can measure."""
    query = select(workers.c.devices).where(workers.c.seen_at > now() - lease_s)
    return {device for row in connection.execute(query) for device in row.devices}


def worker_count(connection: Connection, seconds: float) -> int:
    """Return the number of workers that were alive within this many seconds."""
    query = select(func.count()).where(workers.c.seen_at > now() - seconds)
    return connection.execute(query).scalar_one()
