"""Parts that the routes share: OpenAPI descriptions, and the error for an unknown job."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Path

from remat.documents.base import Record
from remat.service.wire import ProblemDetails
from remat_server.http.problem_responses import MEDIA_TYPE
from remat_server.problems import ServiceProblem

JobId = Annotated[str, Path(max_length=64, description="The job's `id`")]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of problem responses, including those of every route."""
    return only_problems(*statuses, 400, 401, 422, 429, 503)


def only_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of these problem responses only.

    Any route can answer 400, if the host is unknown.
    """
    content = {MEDIA_TYPE: {"schema": reference(ProblemDetails)}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in sorted(set(statuses))
    }


def reference(kind: type[Record]) -> dict[str, str]:
    """Return a reference to a schema that `remat_server.http.app` adds to the OpenAPI document."""
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
"""OpenAPI links from a new job to the operations on it."""


def no_job(id: str) -> ServiceProblem:
    """Return the error for a job that does not exist or belongs to another owner."""
    return ServiceProblem(
        404, f"you have no job {id[:64]!r}: it may have been deleted after its retention time"
    )
