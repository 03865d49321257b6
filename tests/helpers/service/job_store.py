"""The jobs of a store: submit, claim, finish and read them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from tests.helpers.process_limit import PROCESS_LIMIT_S

from remat.service.wire import JobView
from remat_server.store import events, jobs, leases
from remat_server.store.database import Database
from remat_server.store.jobs import NewJob

T = TypeVar("T")

REQUEST = gzip.compress(b"{}", mtime=0)
SUMMARY = {
    "status": "OPTIMAL",
    "budget_bytes": 3,
    "peak_bytes": 2,
    "baseline_peak_bytes": 4,
    "time_s": 1.5,
    "baseline_time_s": 1.0,
    "overhead": 0.5,
    "lower_bound": 0.5,
    "gap": 0.002,
    "operations": 7,
    "library_bytes": 0,
}


def at_once(act: Callable[[int], T], times: int) -> list[T]:
    """Return the results of `act` for 0, 1, ..., called concurrently."""
    gate = threading.Barrier(times)

    def begin(number: int) -> T:
        gate.wait(timeout=PROCESS_LIMIT_S)
        return act(number)

    with ThreadPoolExecutor(times) as pool:
        return [future.result() for future in [pool.submit(begin, i) for i in range(times)]]


def new(content: str, *, owner: str = "ann", **fields: Any) -> NewJob:
    return NewJob(owner=owner, kind="solve", content=content, request=REQUEST, **fields)


def submitted(database: Database, content: str = "content", **fields: Any) -> str:
    with database.write() as connection:
        return jobs.submit(connection, new(content, **fields))


def claim(
    database: Database, worker: str, devices: tuple[str, ...] = ()
) -> leases.ClaimedJob | None:
    with database.write() as connection:
        return leases.claim(connection, worker, devices, 60.0)


def claimed(database: Database, worker: str) -> leases.ClaimedJob:
    lease = claim(database, worker)
    assert lease is not None
    return lease


def expire(database: Database) -> None:
    """Let all leases expire."""
    with database.write() as connection:
        connection.execute(sa.text("UPDATE jobs SET lease_until = lease_until - 1000"))


def finish(
    database: Database,
    worker: str,
    id: str,
    status: str = "succeeded",
    problem: dict[str, Any] | None = None,
    body: bytes = b"body",
    **options: Any,
) -> bool:
    """Finish a job, with the options of `leases.finish`."""
    if status == "succeeded":
        options |= {"body": body, "summary": [SUMMARY]}
    with database.write() as connection:
        return leases.finish(
            connection, worker, id, status, problem=problem, seconds=1.0, **options
        )


def report(database: Database, worker: str, id: str) -> None:
    progress = {"phase": "cost", "elapsed_s": 1.0}
    with database.write() as connection:
        leases.report(connection, worker, id, progress, is_incumbent=False)


def status(database: Database, id: str) -> str:
    with database.read() as connection:
        return viewed(connection, id).status


def viewed(connection: sa.Connection, id: str) -> JobView:
    job = jobs.view(connection, "ann", id)
    assert job is not None
    return job[0]


def answer(connection: sa.Connection, id: str) -> bytes | None:
    job_result = jobs.result(connection, "ann", id)
    assert job_result is not None
    return job_result[1]


def kinds(database: Database, id: str) -> list[str]:
    with database.read() as connection:
        return [event.kind for event in events.events_after(connection, id, 0)]


def numbers(database: Database, id: str, after: int = 0) -> list[int]:
    with database.read() as connection:
        return [event.number for event in events.events_after(connection, id, after)]


def age(database: Database, seconds: float) -> None:
    """Move all times in the store into the past."""
    with database.write() as connection:
        for table, column in (
            ("jobs", "finished_at"),
            ("answers", "used_at"),
            ("workers", "seen_at"),
        ):
            text = f"UPDATE {table} SET {column} = {column} - {seconds}"
            connection.execute(sa.text(text))
