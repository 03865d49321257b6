"""`GET /jobs/{id}/result`: the answer of a job, in the requested format."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from remat import view
from remat.documents.base import validate_json
from remat.documents.plan import PlanDocument
from remat.documents.program import Program
from remat.plan import Plan
from remat.service.wire import (
    ENDED_STATES,
    FitResult,
    JobView,
    SolveResult,
    SweepResult,
    WhyResult,
)
from remat_server.http.routes.common import JobId, no_job, problems, reference
from remat_server.http.state import Owner, request_state
from remat_server.problems import ServiceProblem
from remat_server.store import jobs

router = APIRouter(tags=["jobs"])

ResultFormat = Literal[
    "json", "svg", "html", "chrome", "python", "schedule", "modules", "plan", "program"
]

_MEDIA_TYPES: dict[ResultFormat, str] = {
    "json": "application/json",
    "svg": "image/svg+xml",
    "html": "text/html",
    "chrome": "application/vnd.chrome-trace+json",
    "python": "text/x-python",
    # Only the parameter `format` selects these: `Accept` selects the first of each media type.
    "schedule": "image/svg+xml",
    "modules": "image/svg+xml",
    "plan": "application/json",
    "program": "application/json",
}
_rendering = CapacityLimiter(2)
"""Renders at a time. A picture of a large plan takes seconds and hundreds of megabytes."""
_PICTURES = frozenset[ResultFormat]({"svg", "schedule", "modules"})
_SCHEMAS: dict[ResultFormat, dict[str, Any]] = {
    "json": {
        "oneOf": [
            reference(kind)
            for kind in (
                SolveResult,
                SweepResult,
                FitResult,
                WhyResult,
                JobView,
                PlanDocument,
                Program,
            )
        ]
    },
    "chrome": {"type": "object"},
}
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Content security policy of a rendered page or picture: it has no scripts, and cannot run any."""


class _NoSuchFormatError(Exception):
    """The result of this job has no such format."""


@router.get(
    "/jobs/{id}/result",
    responses={
        200: {
            "description": "The answer; or the job, if it is infeasible",
            "content": {
                media: {"schema": _SCHEMAS.get(result_format, {"type": "string"})}
                for result_format, media in reversed(
                    _MEDIA_TYPES.items()
                )  # the first format of a media type
            },
        },
        **problems(404, 406, 409),
    },
)
async def get_result(
    request: Request,
    owner: Owner,
    id: JobId,
    format: Annotated[ResultFormat | None, Query(description="Overrides `Accept`")] = None,
) -> Response:
    """The plan and the program as JSON, or a picture, a page, a Chrome trace, readable Python.

    `svg` shows the memory over the step, or the frontier of a sweep. `schedule` shows the
    operations over time, and `modules` the recomputed time by module. `plan` and `program` are the
    parts of the JSON answer, for `remat.Plan.load` and `remat.Program.load`.

    Some results have fewer formats: a sweep has JSON and a picture, and a bare graph no program. A
    `format` that a result does not have is not found; an `Accept` that it cannot satisfy is not
    acceptable.
    """
    result_format = format or _preferred_format(request)
    limiter = None if result_format == "json" else _rendering
    try:
        return await run_sync(result_response, request, owner, id, result_format, limiter=limiter)
    except _NoSuchFormatError as error:
        name = "no-such-format" if format else ""
        raise ServiceProblem(404 if format else 406, str(error), name=name) from None


def result_response(
    request: Request,
    owner: str,
    id: str,
    result_format: ResultFormat,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response with a job's result. Raises `ServiceProblem` 404 or 409."""
    with request_state(request).database.read() as connection:
        job_and_body = jobs.result(connection, owner, id)
    if job_and_body is None:
        raise no_job(id)
    job, body = job_and_body
    if body is None:
        if job.status == "infeasible":
            return JSONResponse(job.model_dump(), headers=dict(headers or {}))
        if job.status not in ENDED_STATES:
            text = f"the job is {job.status}; retry later, or watch /jobs/{id}/events"
            raise ServiceProblem(409, text, headers={"Retry-After": "1"})
        reason = job.problem.detail if job.problem is not None else "there is no result"
        raise ServiceProblem(409, f"the job is {job.status}: {reason}")
    all_headers = {"Vary": "Accept, Accept-Encoding", **(headers or {})}
    if result_format == "json":
        if "gzip" in request.headers.get("accept-encoding", ""):
            all_headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return Response(body, media_type=_MEDIA_TYPES[result_format], headers=all_headers)
    if result_format in _PICTURES or result_format == "html":
        all_headers["Content-Security-Policy"] = _PAGE_POLICY
    text = _render(result_format, job.kind, gzip.decompress(body))
    return Response(text, media_type=_MEDIA_TYPES[result_format], headers=all_headers)


def _render(result_format: ResultFormat, kind: str, body: bytes) -> str:
    if kind == "why":
        if result_format != "html":
            raise _NoSuchFormatError("an explanation is available as JSON and HTML")
        return validate_json(WhyResult, body, "answer").explanation.html()
    if kind == "fit":
        raise _NoSuchFormatError("whether a training loop fits is available as JSON only")
    if kind == "sweep":
        documents = validate_json(SweepResult, body, "answer").plans
        plans = [document.to_plan(Plan) for document in documents]
        if result_format != "svg":
            raise _NoSuchFormatError("the result of a sweep is available as JSON and SVG")
        return view.frontier_svg(plans)
    result = validate_json(SolveResult, body, "answer")
    plan = result.plan.to_plan(Plan)
    match result_format:
        case "svg":
            return view.timeline_svg(plan)
        case "schedule":
            return view.schedule_svg(plan)
        case "modules":
            return view.modules_svg(plan)
        case "plan":
            return result.plan.to_json()
        case "html":
            return view.plan_html(plan, result.program)
        case "chrome":
            return view.chrome_trace(plan)
        case _:
            if result.program is None:
                raise _NoSuchFormatError(
                    f"a bare graph has no program, which {result_format} needs"
                )
            if result_format == "program":
                return result.program.to_json()
            return view.annotated_code(result.program, plan)


def _preferred_format(request: Request) -> ResultFormat:
    """Return the available format that the header `Accept` prefers. Raises `ServiceProblem` 406."""
    accepted = request.headers.get("accept", "*/*")
    parts = [part.strip() for part in accepted.split(",")]
    ranked = sorted((part for part in parts if _quality(part) > 0), key=_quality, reverse=True)
    for part in ranked:
        media = part.partition(";")[0].strip().lower()
        if media in ("*/*", "application/*", ""):
            return "json"
        for result_format, available in _MEDIA_TYPES.items():
            if media == available or media == available.partition("/")[0] + "/*":
                return result_format
    raise ServiceProblem(
        406, f"the result is available as {', '.join(dict.fromkeys(_MEDIA_TYPES.values()))}"
    )


def _quality(part: str) -> float:
    try:
        return float(part.partition("q=")[2].partition(";")[0] or 1.0)
    except ValueError:
        return 0.0
