"""`/jobs` and `/sweeps/{id}`: look at jobs, watch them, end them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from anyio import CapacityLimiter, WouldBlock, sleep
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from remat.service.wire import JobPage, JobView, State
from remat_server.http.auth import Owner
from remat_server.http.routes.common import JobId, Store, no_job, problems, reference
from remat_server.problems import ServiceProblem
from remat_server.store import events, jobs
from remat_server.store.database import Database
from remat_server.store.events import Event

router = APIRouter(tags=["jobs"])

_LOOK_S = 0.25
_FIRST_LOOKS_S = 0.05
"""For the first seconds: most jobs are short, and nobody likes to wait."""
_SHORT_S = 3.0
_ALIVE_S = 15.0
_streams = CapacityLimiter(200)
"""Clients that watch at a time."""
_looking = CapacityLimiter(4)
"""Threads that look for them, so that other requests do not wait for their looks."""
_UNMODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "As it was (`If-None-Match`)"}}


@router.get("/jobs", responses=problems())
def list_jobs(
    owner: Owner,
    store: Store,
    status: State | None = None,
    cursor: Annotated[
        str | None,
        Query(pattern="^[0-9]{1,20}$", description="What `next` of the page before says"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobPage:
    """Your jobs, newest first."""
    before = None if cursor is None else min(int(cursor), 2**62)
    with store.read() as connection:
        found, more = jobs.views(connection, owner, status, before, limit)
    return JobPage(jobs=tuple(found), next=None if more is None else str(more))


@router.get("/jobs/{id}", response_model=JobView, responses={**_UNMODIFIED, **problems(404)})
@router.get("/sweeps/{id}", response_model=JobView, responses={**_UNMODIFIED, **problems(404)})
def get_job(
    owner: Owner, store: Store, id: JobId, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """A job's state, with progress while it runs and figures once it has succeeded."""
    with store.read() as connection:
        found = jobs.view(connection, owner, id)
    if found is None:
        raise no_job(id)
    job, revision = found
    headers = {"ETag": f'"{revision}-{job.position}"', "Cache-Control": "no-cache"}
    if _is_among(headers["ETag"], if_none_match or ""):
        return Response(status_code=304, headers=headers)
    return JSONResponse(job.model_dump(), headers=headers)


def _is_among(etag: str, known: str) -> bool:
    """Whether a client knows this; a proxy that compresses marks what it passes on as weak."""
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in known.split(","))


@router.delete(
    "/jobs/{id}",
    status_code=204,
    responses={
        202: {
            "description": "It had not ended: cancelled",
            "content": {"application/json": {"schema": reference(JobView)}},
        },
        204: {"description": "It had ended: forgotten"},
        **problems(404),
    },
)
def delete_job(owner: Owner, store: Store, id: JobId) -> Response:
    """Cancel a job, which frees its core at once; or forget one that has ended."""
    with store.write() as connection:
        done = jobs.cancel(connection, owner, id)
        found = jobs.view(connection, owner, id)
    if done is None:
        raise no_job(id)
    if found is None:
        return Response(status_code=204)
    return JSONResponse(found[0].model_dump(), 202)


async def _job_to_watch(owner: Owner, store: Store, id: JobId) -> AsyncIterator[str]:
    """Decides about 404 and 503 before the stream begins."""
    await run_sync(_require, store, owner, id)
    stream = object()
    try:
        _streams.acquire_on_behalf_of_nowait(stream)
    except WouldBlock:
        text = f"{_streams.total_tokens:g} clients watch jobs now, the most that may; try again"
        raise ServiceProblem(503, text, headers={"Retry-After": "5"}) from None
    try:
        yield id
    finally:
        _streams.release_on_behalf_of(stream)


def _require(store: Database, owner: str, id: str) -> None:
    with store.read() as connection:
        if jobs.view(connection, owner, id) is None:
            raise no_job(id)


@router.get("/jobs/{id}/events", response_class=EventSourceResponse, responses=problems(404))
async def watch_job(
    request: Request,
    store: Store,
    id: Annotated[str, Depends(_job_to_watch)],
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: `status`, `progress`, `incumbent` (a better schedule), and `done`.

    A client that was cut off goes on where it was, by the header `Last-Event-ID`.
    """
    last = int(last_event_id) if last_event_id and last_event_id.isdecimal() else 0
    began = spoke = time.monotonic()
    while not request.app.state.draining.is_set():
        last = min(last, 2**31 - 1)
        found, is_over = await run_sync(_after, store, id, last, limiter=_looking)
        if is_over:
            return
        for event in found:
            last, spoke = event.number, time.monotonic()
            yield ServerSentEvent(event=event.kind, id=str(event.number), data=event.data)
            if event.kind == "done":
                return
        if time.monotonic() > spoke + _ALIVE_S:
            spoke = time.monotonic()
            yield ServerSentEvent(comment="still here")
        await sleep(_FIRST_LOOKS_S if time.monotonic() < began + _SHORT_S else _LOOK_S)


def _after(store: Database, id: str, number: int) -> tuple[list[Event], bool]:
    """The events after a number, and whether there is none and will be none."""
    with store.read() as connection:
        found = events.after(connection, id, number)
        return found, not found and jobs.is_over(connection, id)
