"""What happened to a job, in order, for those who watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from remat_server.store.tables import events


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is status, progress, incumbent or done."""

    number: int
    kind: str
    data: dict[str, Any]


def append(connection: Connection, job: str, kind: str, data: dict[str, Any]) -> None:
    """Add an event. Only who holds the job's row or its lease does, so numbers do not clash."""
    last = select(func.coalesce(func.max(events.c.number), 0)).where(events.c.job == job)
    number = connection.execute(last).scalar_one() + 1
    connection.execute(insert(events).values(job=job, number=number, kind=kind, data=data))


def after(connection: Connection, job: str, number: int) -> list[Event]:
    """The events after a number, at most a thousand."""
    query = (
        select(events.c.number, events.c.kind, events.c.data)
        .where(events.c.job == job, events.c.number > number)
        .order_by(events.c.number)
        .limit(1000)
    )
    return [Event(row.number, row.kind, row.data) for row in connection.execute(query)]
