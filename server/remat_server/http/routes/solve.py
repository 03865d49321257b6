"""`POST /solve`, `POST /sweeps`, `POST /fit` and `POST /why`: submits jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import CapacityLimiter, sleep
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response

from remat.service import wire
from remat_server.http.routes.common import LINKS, problems, reference
from remat_server.http.routes.results import result_response
from remat_server.http.state import Owner, app_state
from remat_server.problems import ServiceProblem
from remat_server.store import jobs
from remat_server.store.database import Database

router = APIRouter(tags=["solving"])

_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,6})(?:$|[,;\s])")
_POLL_INTERVAL_S = 0.05

_validating = CapacityLimiter(2)
"""Documents that are validated at a time. A large one takes hundreds of megabytes."""

Prefer = Annotated[
    str | None,
    Header(description="`wait=N`: answer with the result if it is ready within N seconds"),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Any unique text: a repeated request with the same key creates no second job",
    ),
]
DryRun = Annotated[bool, Query(description="Only validate the request, and return its sizes")]


_EXAMPLE = {
    "operations": [
        {
            "name": name,
            "inputs": inputs,
            "outputs": [output],
            "cost_s": 0.001,
            "workspace_bytes": 0,
            "backward": backward,
            "recomputable": name != "loss",
            "module": "",
        }
        for output, (name, inputs, backward) in enumerate(
            (
                ("linear", [], False),
                ("tanh", [0], False),
                ("loss", [1], False),
                ("tanh_backward", [1, 2], True),
                ("linear_backward", [0, 3], True),
            )
        )
    ],
    "values": [{"name": f"v{number}", "size_bytes": 4096} for number in range(5)],
    "results": [4],
    "constant_bytes": 0,
    "boundary": 2,
}
"""The graph of the example request."""


def _openapi_arguments(
    body: type[wire.AnyRequest],
    result: type[Any],
    **example: Any,
) -> dict[str, Any]:
    """Return the parts of the OpenAPI document that FastAPI cannot derive, as `BodyReader` reads
    the bodies."""
    json = "application/json"
    body_schema, answer_schema, job_schema = (
        reference(kind) for kind in (body, result, wire.JobView)
    )
    request_body: dict[str, Any] = {"schema": body_schema}
    if example:
        request_body["example"] = {"graph": _EXAMPLE, **example}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {json: request_body}}},
        "status_code": 202,
        "responses": {
            200: {
                "description": "The sizes (`dry_run`), or the result (`Prefer: wait`), or the job "
                "if it ended without a result",
                "content": {
                    json: {
                        "schema": {
                            "oneOf": [reference(wire.DryRunResult), answer_schema, job_schema]
                        }
                    }
                },
            },
            202: {
                "description": "Accepted",
                "content": {json: {"schema": job_schema}},
                "headers": {"Location": {"schema": {"type": "string"}}},
                "links": LINKS,
            },
            **problems(408, 409, 413, 415),
        },
    }


@dataclass(frozen=True, slots=True)
class PostedRequest:
    """The parameters of all routes."""

    request: Request
    owner: Owner
    prefer: Prefer = None
    idempotency_key: IdempotencyKey = None
    dry_run: DryRun = False


@router.post("/solve", **_openapi_arguments(wire.SolveRequest, wire.SolveResult, budget="75%"))
async def post_solve(posted: Annotated[PostedRequest, Depends()]) -> Response:
    """Find the schedule within a budget that has the least extra time, and the program for it."""
    return await _handle_post(posted, "solve")


@router.post(
    "/sweeps", **_openapi_arguments(wire.SweepRequest, wire.SweepResult, budgets=["min", "100%"])
)
async def post_sweep(posted: Annotated[PostedRequest, Depends()]) -> Response:
    """Find the time/memory frontier over many budgets."""
    return await _handle_post(posted, "sweep")


@router.post("/fit", **_openapi_arguments(wire.FitRequest, wire.FitResult))
async def post_fit(posted: Annotated[PostedRequest, Depends()]) -> Response:
    """Predict whether a training loop fits a GPU with its optimizer, and what makes it fit.

    The service captures no models: trace the step for a GPU, `remat.trace(..., device="h100")`.
    """
    return await _handle_post(posted, "fit")


_WHY_ARGUMENTS = _openapi_arguments(wire.FitRequest, wire.WhyResult)
_WHY_ARGUMENTS["openapi_extra"]["requestBody"]["content"] = {
    media: {"schema": {"type": "string", "format": "binary"}}
    for media in ("application/octet-stream", "text/plain")
}


@router.post("/why", **_WHY_ARGUMENTS)
async def post_why(posted: Annotated[PostedRequest, Depends()]) -> Response:
    """Explain an out-of-memory error: what took the memory, and what to do.

    The body is the file that `torch.cuda.memory._dump_snapshot` wrote, or the text of an error. It
    is read as plain data: a file with code in it is refused.
    """
    return await _handle_post(posted, "why")


async def _handle_post(posted: PostedRequest, kind: wire.JobKind) -> Response:
    request, owner = posted.request, posted.owner
    state = app_state(request.app)
    if state.draining.is_set():
        raise ServiceProblem(
            503, "the service is shutting down; try again", headers={"Retry-After": "10"}
        )
    job = await _submit(posted, kind)
    if isinstance(job, wire.DryRunResult):
        return JSONResponse(job.model_dump())
    location = f"/sweeps/{job.id}" if kind == "sweep" else f"/jobs/{job.id}"
    headers = {"Location": location}
    preference = _WAIT.search(posted.prefer or "")
    if preference is None:
        return JSONResponse(job.model_dump(), 202, headers)
    wait_s = min(float(preference[1]), state.settings.wait_s)
    headers["Preference-Applied"] = f"wait={wait_s:g}"
    waited_s = 0.0
    while job.status not in wire.ENDED_STATES and waited_s < wait_s and not state.draining.is_set():
        await sleep(_POLL_INTERVAL_S)
        waited_s += _POLL_INTERVAL_S
        job = await run_sync(_refreshed, state.database, owner, job)
    if job.status not in wire.ENDED_STATES:
        return JSONResponse(job.model_dump(), 202, headers)
    if job.status != "succeeded":
        return JSONResponse(job.model_dump(), 200, headers)
    return await run_sync(result_response, request, owner, job.id, "json", headers)


async def _submit(posted: PostedRequest, kind: wire.JobKind) -> wire.JobView | wire.DryRunResult:
    """Read the body and submit a job, or return the sizes of a dry run.

    The body is freed before the caller waits for the job.
    """
    state = app_state(posted.request.app)
    async with state.bodies.read(posted.request) as body:
        if posted.dry_run:
            return await run_sync(state.intake.dry_run_sizes, kind, body, limiter=_validating)
        request_id: str = posted.request.scope["state"]["request_id"]
        key = posted.idempotency_key
        return await run_sync(
            state.intake.submit, kind, body, posted.owner, key, request_id, limiter=_validating
        )


def _refreshed(database: Database, owner: str, job: wire.JobView) -> wire.JobView:
    """Return the job's current state; a job that was deleted meanwhile is reported as cancelled."""
    with database.read() as connection:
        view_and_revision = jobs.view(connection, owner, job.id)
    if view_and_revision is None:
        return job.model_copy(update={"status": "cancelled"})
    return view_and_revision[0]
