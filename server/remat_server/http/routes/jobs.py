"""`/jobs` and `/sweeps/{id}`: lists jobs, shows their state and events, cancels and deletes
them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from anyio import CapacityLimiter, WouldBlock, sleep
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from remat.service.wire import JobPage, JobState, JobView
from remat_server.http.routes.common import JobId, no_job, problems, reference
from remat_server.http.state import Owner, Store, request_state
from remat_server.problems import ServiceProblem
from remat_server.store import events, jobs
from remat_server.store.database import Database
from remat_server.store.events import Event

router = APIRouter(tags=["jobs"])

_POLL_INTERVAL_S = 0.25
_FIRST_POLL_INTERVAL_S = 0.05
"""Interval during the first `_FIRST_POLLS_S` seconds, because most jobs are short."""
_FIRST_POLLS_S = 3.0
_KEEP_ALIVE_S = 15.0
_streams = CapacityLimiter(200)
"""Event streams that may be open at a time."""
_polling = CapacityLimiter(4)
"""Threads that poll the store for event streams, so that other requests do not wait for them."""
_UNMODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "Unchanged (`If-None-Match`)"}}


@router.get("/jobs", responses=problems())
def list_jobs(
    owner: Owner,
    store: Store,
    status: JobState | None = None,
    cursor: Annotated[
        str | None,
        Query(pattern="^[0-9]{1,20}$", description="`next` of the previous page"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobPage:
    """List your jobs, newest first."""
    before = None if cursor is None else min(int(cursor), 2**62)
    with store.read() as connection:
        page, next_cursor = jobs.list_views(connection, owner, status, before, limit)
    return JobPage(jobs=tuple(page), next=None if next_cursor is None else str(next_cursor))


@router.get("/jobs/{id}", response_model=JobView, responses={**_UNMODIFIED, **problems(404)})
@router.get("/sweeps/{id}", response_model=JobView, responses={**_UNMODIFIED, **problems(404)})
def get_job(
    owner: Owner, store: Store, id: JobId, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Return a job's state, with its progress while it runs and a summary once it has succeeded."""
    with store.read() as connection:
        view_and_revision = jobs.view(connection, owner, id)
    if view_and_revision is None:
        raise no_job(id)
    job, revision = view_and_revision
    headers = {"ETag": f'"{revision}-{job.position}"', "Cache-Control": "no-cache"}
    if _is_among(headers["ETag"], if_none_match or ""):
        return Response(status_code=304, headers=headers)
    return JSONResponse(job.model_dump(), headers=headers)


def _is_among(etag: str, if_none_match: str) -> bool:
    """True if the client has the version `etag`. A proxy that compresses marks ETags as weak."""
    tags = if_none_match.split(",")
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in tags)


@router.delete(
    "/jobs/{id}",
    status_code=204,
    responses={
        202: {
            "description": "The job had not ended, and is now cancelled",
            "content": {"application/json": {"schema": reference(JobView)}},
        },
        204: {"description": "The job had ended, and is now deleted"},
        **problems(404),
    },
)
def delete_job(owner: Owner, store: Store, id: JobId) -> Response:
    """Cancel a job, which frees its CPU core within a second; or delete a job that has ended."""
    with store.write() as connection:
        action = jobs.cancel_or_delete(connection, owner, id)
        view_and_revision = jobs.view(connection, owner, id)
    if action is None:
        raise no_job(id)
    if view_and_revision is None:
        return Response(status_code=204)
    return JSONResponse(view_and_revision[0].model_dump(), 202)


async def _job_to_watch(owner: Owner, store: Store, id: JobId) -> AsyncIterator[str]:
    """Provide the id of a job to watch; raise 404 and 503 before the stream starts."""
    await run_sync(_require_job, store, owner, id)
    stream = object()
    try:
        _streams.acquire_on_behalf_of_nowait(stream)
    except WouldBlock:
        text = f"{_streams.total_tokens:g} clients watch jobs, which is the limit; try again later"
        raise ServiceProblem(503, text, headers={"Retry-After": "5"}) from None
    try:
        yield id
    finally:
        _streams.release_on_behalf_of(stream)


def _require_job(store: Database, owner: str, id: str) -> None:
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

    After a lost connection, a client resumes with the header `Last-Event-ID`.
    """
    last_number = int(last_event_id) if last_event_id and last_event_id.isdecimal() else 0
    started_at_s = last_sent_at_s = time.monotonic()
    draining = request_state(request).draining
    while not draining.is_set():
        last_number = min(last_number, 2**31 - 1)
        new_events, is_over = await run_sync(
            _events_after, store, id, last_number, limiter=_polling
        )
        if is_over:
            return
        for event in new_events:
            last_number, last_sent_at_s = event.number, time.monotonic()
            yield ServerSentEvent(event=event.kind, id=str(event.number), data=event.data)
            if event.kind == "done":
                return
        if time.monotonic() > last_sent_at_s + _KEEP_ALIVE_S:
            last_sent_at_s = time.monotonic()
            yield ServerSentEvent(comment="keep-alive")
        is_recent = time.monotonic() < started_at_s + _FIRST_POLLS_S
        await sleep(_FIRST_POLL_INTERVAL_S if is_recent else _POLL_INTERVAL_S)


def _events_after(store: Database, id: str, number: int) -> tuple[list[Event], bool]:
    """Return the events after a number, and True if there is none and no more will come."""
    with store.read() as connection:
        new_events = events.events_after(connection, id, number)
        return new_events, not new_events and jobs.is_over(connection, id)
