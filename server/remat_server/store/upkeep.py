"""What must be done now and then: forget old jobs and plans, fail jobs that lose every worker."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, func, select

from remat_server.problems import problem
from remat_server.store.database import now
from remat_server.store.jobs import end
from remat_server.store.leases import IS_FREE
from remat_server.store.tables import answers, jobs, workers
from remat_server.store.tallies import count

_GONE_S = 3600.0


def clean(connection: Connection, retention_s: float) -> int:
    """Forget what ended longer ago than `retention_s`; returns how many jobs."""
    old = delete(jobs).where(jobs.c.finished_at < now() - retention_s)
    forgotten = connection.execute(old).rowcount
    is_shown = exists().where(jobs.c.content == answers.c.content)
    connection.execute(delete(answers).where(answers.c.used_at < now() - retention_s, ~is_shown))
    connection.execute(delete(workers).where(workers.c.seen_at < now() - _GONE_S))
    return forgotten


def fail_hopeless(connection: Connection, attempts: int) -> list[str]:
    """Fail the jobs that lost their worker `attempts` times: they may be what kills it."""
    query = select(jobs.c.id, jobs.c.kind).where(IS_FREE, jobs.c.attempts >= attempts)
    found = connection.execute(query.with_for_update(skip_locked=True)).all()
    for row in found:
        detail = f"the job's worker was lost {attempts} times, most likely because of the job"
        document = problem(500, detail, "worker-lost").model_dump(exclude_none=True)
        end(connection, row.id, "failed", document)
        count(connection, "finished", kind=row.kind, status="failed")
    return [row.id for row in found]


def depth(connection: Connection) -> dict[str, int]:
    """How many jobs are in each state."""
    query = select(jobs.c.status, func.count()).group_by(jobs.c.status)
    return {row[0]: row[1] for row in connection.execute(query)}
