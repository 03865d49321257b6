"""What the routes share: their documented problems, and the application's parts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Request

from remat.wire import Problem
from remat_server.intake import Intake
from remat_server.problems import MEDIA_TYPE, ServiceProblem
from remat_server.store.database import Database

JobId = Annotated[str, Path(max_length=64, description="As in the job's `id`")]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of problem responses; some can come of any route."""
    schema = {"$ref": "#/components/schemas/Problem"}
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 400, 401, 422, 429, 503}):
        found[status] = {"description": "A problem", "content": {MEDIA_TYPE: {"schema": schema}}}
    return found


def _database(request: Request) -> Database:
    return request.app.state.database


def _intake(request: Request) -> Intake:
    return request.app.state.intake


Store = Annotated[Database, Depends(_database)]
Accepting = Annotated[Intake, Depends(_intake)]


def no_job(id: str) -> ServiceProblem:
    """The same for a job of another and for none at all."""
    return ServiceProblem(
        404, f"you have no job {id[:64]!r}: it may have been forgotten after its retention time"
    )


__all__ = ["Accepting", "JobId", "Problem", "Store", "no_job", "problems"]
