"""Jobs as workers see them: claim, keep, report, finish, give back.

A worker holds a job by a lease that it renews. Where it does not, another takes the job: a solve is
pure, so running one twice is harmless, and only the holder of the lease can finish it. A job that
does not run has no worker and no lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, exists, func, or_, select, update

from remat_server.store.database import insert_or, now
from remat_server.store.events import append
from remat_server.store.jobs import end, is_answered, own_content
from remat_server.store.tables import answers, jobs, workers
from remat_server.store.tallies import GAPS, SECONDS, count, observe

IS_FREE = or_(
    jobs.c.status == "queued", and_(jobs.c.status == "running", jobs.c.lease_until < now())
)
"""Of a job: it waits, or its worker is lost. PostgreSQL asks this again once the job is locked, and
not what is asked of others."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job to solve."""

    id: str
    kind: str
    request: bytes
    request_id: str
    attempts: int
    needs: str


def claim(
    connection: Connection, worker: str, devices: Sequence[str], lease_s: float
) -> Claimed | None:
    """Take the oldest job that can be done here: queued, or lost by its worker.

    A job that asks what another asks that is being solved waits for that one's answer.
    """
    while True:
        query = _next(devices).with_for_update(skip_locked=True)
        found = connection.execute(query).first()
        if found is None:
            return None
        if is_answered(connection, found.content):
            _answer_from_store(connection, found)
            continue
        taken = update(jobs).where(jobs.c.id == found.id)
        connection.execute(
            taken.values(
                status="running",
                worker=worker,
                lease_until=now() + lease_s,
                started_at=now(),
                attempts=jobs.c.attempts + 1,
                progress=None,
                revision=jobs.c.revision + 1,
            )
        )
        append(connection, found.id, "status", {"status": "running"})
        return Claimed(
            id=found.id,
            kind=found.kind,
            request=found.request,
            request_id=found.request_id,
            attempts=found.attempts + 1,
            needs=found.needs,
        )


def is_any_free(connection: Connection, devices: Sequence[str]) -> bool:
    """Whether `claim` would most likely find a job; only reads."""
    return connection.execute(_next(devices)).first() is not None


def _next(devices: Sequence[str]) -> Select[Any]:
    other = jobs.alias()
    is_solved_now = exists().where(
        other.c.content == jobs.c.content,
        other.c.status == "running",
        other.c.lease_until >= now(),
    )
    return (
        select(jobs)
        .where(IS_FREE, jobs.c.needs.in_(["", *devices]), ~is_solved_now)
        .order_by(jobs.c.number)
        .limit(1)
    )


def _answer_from_store(connection: Connection, job: Any) -> None:
    end(connection, job.id, "succeeded")
    count(connection, "answered_from_store", kind=job.kind)


def renew(connection: Connection, worker: str, ids: Sequence[str], lease_s: float) -> set[str]:
    """Keep jobs for another while; returns those that are still this worker's."""
    kept = (
        update(jobs)
        .where(jobs.c.id.in_(ids), jobs.c.worker == worker)
        .values(lease_until=now() + lease_s)
        .returning(jobs.c.id)
    )
    return {row.id for row in connection.execute(kept)}


def still_held(connection: Connection, worker: str, ids: Sequence[str]) -> set[str]:
    """Those of the jobs that are still this worker's: a cancelled job is nobody's."""
    query = select(jobs.c.id).where(jobs.c.id.in_(ids), jobs.c.worker == worker)
    return {row.id for row in connection.execute(query)}


def report(
    connection: Connection, worker: str, id: str, progress: dict[str, Any], is_incumbent: bool
) -> None:
    """Tell how far a job is; nothing happens where it is no longer this worker's."""
    told = (
        update(jobs)
        .where(jobs.c.id == id, jobs.c.worker == worker)
        .values(progress=progress, revision=jobs.c.revision + 1)
    )
    if connection.execute(told).rowcount:
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
    """End a job with its answer or its problem. False where it is no longer this worker's.

    An answer that is not shared is this job's only: whoever asks the same is solved for again.
    """
    query = select(jobs.c.content, jobs.c.kind).where(jobs.c.id == id, jobs.c.worker == worker)
    held = connection.execute(query.with_for_update()).first()
    if held is None:
        return False
    if body is not None:
        content = held.content if is_shared else own_content(held.content, id)
        connection.execute(update(jobs).where(jobs.c.id == id).values(content=content))
        made = insert_or(connection, answers).values(
            content=content, body=body, summary=list(summary), used_at=now()
        )
        connection.execute(made.on_conflict_do_nothing(index_elements=["content"]))
    end(connection, id, status, problem)
    count(connection, "finished", kind=held.kind, status=status)
    observe(connection, "solve_seconds", seconds, SECONDS)
    for plan in summary:
        if plan["gap"] is not None:
            observe(connection, "gap", plan["gap"], GAPS)
    return True


def give_back(
    connection: Connection, worker: str, ids: Sequence[str], *, is_attempt: bool = False
) -> None:
    """Queue jobs again that this worker will not finish; by default this is no attempt."""
    given = (
        update(jobs)
        .where(jobs.c.id.in_(ids), jobs.c.worker == worker)
        .values(
            status="queued",
            worker=None,
            lease_until=None,
            attempts=jobs.c.attempts - (0 if is_attempt else 1),
            revision=jobs.c.revision + 1,
        )
        .returning(jobs.c.id)
    )
    for row in connection.execute(given).all():
        append(connection, row.id, "status", {"status": "queued"})


def present(connection: Connection, name: str, devices: Sequence[str], slots: int) -> None:
    """Tell that a worker is there, and what it can do."""
    told = insert_or(connection, workers).values(
        name=name, devices=list(devices), slots=slots, seen_at=now()
    )
    connection.execute(
        told.on_conflict_do_update(
            index_elements=["name"],
            set_={"devices": told.excluded.devices, "slots": slots, "seen_at": now()},
        )
    )


def leave(connection: Connection, name: str) -> None:
    """The worker goes."""
    connection.execute(delete(workers).where(workers.c.name == name))


def devices_present(connection: Connection, lease_s: float) -> set[str]:
    """The device types that some living worker can measure on."""
    query = select(workers.c.devices).where(workers.c.seen_at > now() - lease_s)
    return {device for row in connection.execute(query) for device in row.devices}


def worker_count(connection: Connection, seconds: float) -> int:
    """How many workers were seen lately."""
    query = select(func.count()).where(workers.c.seen_at > now() - seconds)
    return connection.execute(query).scalar_one()
