"""What the routes share: their documented problems, and the application's parts."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Path, Request

from remat.documents.base import Record
from remat.service.wire import Problem
from remat_server.http.problem_responses import MEDIA_TYPE
from remat_server.problems import ServiceProblem
from remat_server.store.database import Database

JobId = Annotated[str, Path(max_length=64, description="As in the job's `id`")]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of problem responses; some can come of any route."""
    return only_problems(*statuses, 400, 401, 422, 429, 503)


def only_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of just these. 400 can come of any route: the host may be unknown."""
    content = {MEDIA_TYPE: {"schema": reference(Problem)}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in sorted(set(statuses))
    }


def reference(kind: type[Record]) -> dict[str, str]:
    """To a schema that `remat_server.http.app` adds to the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


LINKS = {
    name: {"operationId": operation, "parameters": {"id": "$response.body#/id"}}
    for name, operation in (
        ("job", "get_job_jobs__id__get"),
        ("events", "watch_job_jobs__id__events_get"),
        ("result", "get_result_jobs__id__result_get"),
        ("cancel", "delete_job_jobs__id__delete"),
    )
}
"""What can be done with a job that was made."""


def _database(request: Request) -> Database:
    return request.app.state.database


Store = Annotated[Database, Depends(_database)]


def no_job(id: str) -> ServiceProblem:
    """The same for a job of another and for none at all."""
    return ServiceProblem(
        404, f"you have no job {id[:64]!r}: it may have been forgotten after its retention time"
    )
