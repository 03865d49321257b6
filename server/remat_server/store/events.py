"""The events of each job in order, for clients that watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from remat_server.store.tables import events


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job; `kind` is "status", "progress", "incumbent" or "done"."""

    number: int
    kind: str
    data: dict[str, Any]


def append(connection: Connection, job: str, kind: str, data: dict[str, Any]) -> None:
    """Append an event. Call it only with the job's row locked or its lease owned, so that the
    numbers are unique."""
    last_number = select(func.coalesce(func.max(events.c.number), 0)).where(events.c.job == job)
    number = connection.execute(last_number).scalar_one() + 1
    connection.execute(insert(events).values(job=job, number=number, kind=kind, data=data))


def events_after(connection: Connection, job: str, number: int) -> list[Event]:
    """Return the events of a job after a number, at most 1000."""
    query = (
        select(events.c.number, events.c.kind, events.c.data)
        .where(events.c.job == job, events.c.number > number)
        .order_by(events.c.number)
        .limit(1000)
    )
    return [Event(row.number, row.kind, row.data) for row in connection.execute(query)]
