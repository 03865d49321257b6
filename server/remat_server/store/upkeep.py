"""Periodic maintenance: deletes old jobs and answers, and fails jobs whose workers are lost."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, func, select

from remat_server.problems import make_problem
from remat_server.store.database import now
from remat_server.store.jobs import end
from remat_server.store.leases import IS_FREE
from remat_server.store.tables import answers, jobs, workers
from remat_server.store.tallies import count

_WORKER_RETENTION_S = 3600.0


def delete_expired(connection: Connection, retention_s: float) -> int:
    """Delete jobs and answers older than `retention_s`; return the number of deleted jobs."""
    delete_old = delete(jobs).where(jobs.c.finished_at < now() - retention_s)
    deleted_count = connection.execute(delete_old).rowcount
    is_referenced = exists().where(jobs.c.content == answers.c.content)
    connection.execute(
        delete(answers).where(answers.c.used_at < now() - retention_s, ~is_referenced)
    )
    connection.execute(delete(workers).where(workers.c.seen_at < now() - _WORKER_RETENTION_S))
    return deleted_count


def fail_lost_jobs(connection: Connection, attempts: int) -> list[str]:
    """Fail the jobs that lost their worker `attempts` times, since they may be the cause."""
    query = select(jobs.c.id, jobs.c.kind).where(IS_FREE, jobs.c.attempts >= attempts)
    lost_jobs = connection.execute(query.with_for_update(skip_locked=True)).all()
    for row in lost_jobs:
        detail = f"the job's worker was lost {attempts} times, probably because of the job"
        document = make_problem(500, detail, "worker-lost").model_dump(exclude_none=True)
        end(connection, row.id, "failed", document)
        count(connection, "finished", kind=row.kind, status="failed")
    return [row.id for row in lost_jobs]


def job_counts(connection: Connection) -> dict[str, int]:
    """Return the number of jobs in each state."""
    query = select(jobs.c.status, func.count()).group_by(jobs.c.status)
    return {row[0]: row[1] for row in connection.execute(query)}
