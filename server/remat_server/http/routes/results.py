"""`GET /jobs/{id}/result`: what was solved, in the form that was asked for."""

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
from remat.service.wire import ENDED, Answer, JobView, SweepAnswer
from remat_server.http.auth import Owner
from remat_server.http.routes.common import JobId, no_job, problems, reference
from remat_server.problems import ServiceProblem
from remat_server.store import jobs

router = APIRouter(tags=["jobs"])

Form = Literal["json", "svg", "html", "chrome", "python", "schedule", "modules", "plan", "program"]

_MEDIA: dict[Form, str] = {
    "json": "application/json",
    "svg": "image/svg+xml",
    "html": "text/html",
    "chrome": "application/vnd.chrome-trace+json",
    "python": "text/x-python",
    # Asked for by `format`; an `Accept` of these kinds means the first of each.
    "schedule": "image/svg+xml",
    "modules": "image/svg+xml",
    "plan": "application/json",
    "program": "application/json",
}
_rendering = CapacityLimiter(2)
"""A picture of a large plan takes seconds and hundreds of megabytes, so few are made at a time."""
_PICTURES = frozenset[Form]({"svg", "schedule", "modules"})
_SCHEMAS: dict[Form, dict[str, Any]] = {
    "json": {
        "oneOf": [reference(kind) for kind in (Answer, SweepAnswer, JobView, PlanDocument, Program)]
    },
    "chrome": {"type": "object"},
}
_FRAME = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Of a page that the service makes: it has no scripts, and could run none."""


@router.get(
    "/jobs/{id}/result",
    responses={
        200: {
            "description": "The answer; or the job, where it is infeasible",
            "content": {
                media: {"schema": _SCHEMAS.get(form, {"type": "string"})}
                for form, media in reversed(_MEDIA.items())  # the first of a kind documents it
            },
        },
        **problems(404, 406, 409),
    },
)
async def get_result(
    request: Request,
    owner: Owner,
    id: JobId,
    format: Annotated[Form | None, Query(description="Instead of the header `Accept`")] = None,
) -> Response:
    """The plan and the program as JSON, or a picture, a page, a Chrome trace, readable Python.

    `svg` is the memory over the step (of a sweep, the frontier), `schedule` what runs when,
    `modules` what is recomputed where; `plan` and `program` are the parts of the JSON answer, as
    `remat.Plan.load` and `remat.Program.load` read them.
    """
    form = format or _accepted(request)
    limiter = None if form == "json" else _rendering
    return await run_sync(result_response, request, owner, id, form, limiter=limiter)


def result_response(
    request: Request, owner: str, id: str, form: Form, headers: Mapping[str, str] | None = None
) -> Response:
    """The response with a job's result. Raises `ServiceProblem` 404 or 409."""
    with request.app.state.database.read() as connection:
        found = jobs.result(connection, owner, id)
    if found is None:
        raise no_job(id)
    job, body = found
    if body is None:
        if job.status == "infeasible":
            return JSONResponse(job.model_dump(), headers=dict(headers or {}))
        if job.status not in ENDED:
            text = f"the job is {job.status}; ask again later, or watch /jobs/{id}/events"
            raise ServiceProblem(409, text, headers={"Retry-After": "1"})
        why = job.problem.detail if job.problem is not None else "there is no result"
        raise ServiceProblem(409, f"the job is {job.status}: {why}")
    all_headers = {"Vary": "Accept, Accept-Encoding", **(headers or {})}
    if form == "json":
        if "gzip" in request.headers.get("accept-encoding", ""):
            all_headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return Response(body, media_type=_MEDIA[form], headers=all_headers)
    if form in _PICTURES or form == "html":
        all_headers["Content-Security-Policy"] = _FRAME
    text = _render(form, job.kind, gzip.decompress(body))
    return Response(text, media_type=_MEDIA[form], headers=all_headers)


def _render(form: Form, kind: str, body: bytes) -> str:
    if kind == "sweep":
        plans = [each.read(Plan) for each in validate_json(SweepAnswer, body, "answer").plans]
        if form != "svg":
            raise ServiceProblem(406, "a sweep is offered as JSON and as SVG")
        return view.frontier_svg(plans)
    answer = validate_json(Answer, body, "answer")
    plan = answer.plan.read(Plan)
    match form:
        case "svg":
            return view.timeline_svg(plan)
        case "schedule":
            return view.schedule_svg(plan)
        case "modules":
            return view.modules_svg(plan)
        case "plan":
            return answer.plan.to_json()
        case "html":
            return view.plan_html(plan, answer.program)
        case "chrome":
            return view.chrome_trace(plan)
        case _:
            if answer.program is None:
                raise ServiceProblem(406, f"a bare graph has no program to show as {form}")
            if form == "program":
                return answer.program.to_json()
            return view.annotated_code(answer.program, plan)


def _accepted(request: Request) -> Form:
    """The first form offered that the client accepts, by the client's order."""
    accepted = request.headers.get("accept", "*/*")
    parts = [part.strip() for part in accepted.split(",")]
    ranked = sorted((part for part in parts if _quality(part) > 0), key=_quality, reverse=True)
    for part in ranked:
        media = part.partition(";")[0].strip().lower()
        if media in ("*/*", "application/*", ""):
            return "json"
        for form, offered in _MEDIA.items():
            if media == offered or media == offered.partition("/")[0] + "/*":
                return form
    raise ServiceProblem(
        406, f"the result is offered as {', '.join(dict.fromkeys(_MEDIA.values()))}"
    )


def _quality(part: str) -> float:
    try:
        return float(part.partition("q=")[2].partition(";")[0] or 1.0)
    except ValueError:
        return 0.0
