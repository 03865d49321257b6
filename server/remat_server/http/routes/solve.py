"""`POST /solve` and `POST /sweeps`: work comes in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import CapacityLimiter, sleep
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response

from remat.service import wire
from remat_server.http.auth import Owner
from remat_server.http.routes.common import LINKS, problems, reference
from remat_server.http.routes.results import result_response
from remat_server.problems import ServiceProblem
from remat_server.store import jobs

router = APIRouter(tags=["solving"])

_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,6})(?:$|[,;\s])")
_LOOK_S = 0.05

_validating = CapacityLimiter(2)
"""A large document takes hundreds of megabytes while it is validated, so few are at a time."""

Prefer = Annotated[
    str | None, Header(description="`wait=N`: answer with the result if it is there in N seconds")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Any new text: a request that is sent again under it makes no second job",
    ),
]
DryRun = Annotated[bool, Query(description="Only validate, and tell the sizes")]


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
"""A graph to begin with."""


def _documented(
    body: type[wire.SolveRequest | wire.SweepRequest], answer: type[Any], **example: Any
) -> dict[str, Any]:
    """The parts of the OpenAPI document that FastAPI cannot see, as bodies are read by hand."""
    json = "application/json"
    schema, made, view = (reference(kind) for kind in (body, answer, wire.JobView))
    posted = {"schema": schema, "example": {"graph": _EXAMPLE, **example}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {json: posted}}},
        "status_code": 202,
        "responses": {
            200: {
                "description": "The sizes (`dry_run`), or the result (`Prefer: wait`), or the job "
                "where it ended without one",
                "content": {json: {"schema": {"oneOf": [reference(wire.Sizes), made, view]}}},
            },
            202: {
                "description": "Accepted",
                "content": {json: {"schema": view}},
                "headers": {"Location": {"schema": {"type": "string"}}},
                "links": LINKS,
            },
            **problems(408, 413, 415),
        },
    }


@dataclass(frozen=True, slots=True)
class Posted:
    """What both routes are given."""

    request: Request
    owner: Owner
    prefer: Prefer = None
    idempotency_key: IdempotencyKey = None
    dry_run: DryRun = False


@router.post("/solve", **_documented(wire.SolveRequest, wire.Answer, budget="75%"))
async def post_solve(posted: Annotated[Posted, Depends()]) -> Response:
    """The cheapest schedule within a budget, and the program that runs it."""
    return await _accept(posted, "solve")


@router.post("/sweeps", **_documented(wire.SweepRequest, wire.SweepAnswer, budgets=["min", "100%"]))
async def post_sweep(posted: Annotated[Posted, Depends()]) -> Response:
    """The time/memory frontier over many budgets."""
    return await _accept(posted, "sweep")


async def _accept(posted: Posted, kind: wire.Kind) -> Response:
    request, owner = posted.request, posted.owner
    state = request.app.state
    if state.draining.is_set():
        raise ServiceProblem(
            503, "the service is being stopped; try again", headers={"Retry-After": "10"}
        )
    job = await _take(posted, kind)
    if isinstance(job, wire.Sizes):
        return JSONResponse(job.model_dump())
    where = f"/jobs/{job.id}" if kind == "solve" else f"/sweeps/{job.id}"
    headers = {"Location": where}
    asked = _WAIT.search(posted.prefer or "")
    if asked is None:
        return JSONResponse(job.model_dump(), 202, headers)
    wait_s = min(float(asked[1]), state.settings.wait_s)
    headers["Preference-Applied"] = f"wait={wait_s:g}"
    spent_s = 0.0
    while job.status not in wire.ENDED and spent_s < wait_s and not state.draining.is_set():
        await sleep(_LOOK_S)
        spent_s += _LOOK_S
        job = await run_sync(_look, state.database, owner, job)
    if job.status not in wire.ENDED:
        return JSONResponse(job.model_dump(), 202, headers)
    if job.status != "succeeded":
        return JSONResponse(job.model_dump(), 200, headers)
    return await run_sync(result_response, request, owner, job.id, "json", headers)


async def _take(posted: Posted, kind: wire.Kind) -> wire.JobView | wire.Sizes:
    """What became of a body, which is let go of before anybody waits for the job."""
    state = posted.request.app.state
    async with state.bodies.read(posted.request) as body:
        if posted.dry_run:
            return await run_sync(state.intake.sizes, kind, body, limiter=_validating)
        request_id: str = posted.request.scope["state"]["request_id"]
        key = posted.idempotency_key
        return await run_sync(
            state.intake.accept, kind, body, posted.owner, key, request_id, limiter=_validating
        )


def _look(database: Any, owner: str, job: wire.JobView) -> wire.JobView:
    with database.read() as connection:
        found = jobs.view(connection, owner, job.id)
    # Whoever forgets a job while waiting for it is told that it is cancelled.
    return job.model_copy(update={"status": "cancelled"}) if found is None else found[0]
