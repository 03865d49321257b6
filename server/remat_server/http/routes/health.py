"""`/livez`, `/readyz` and `/metrics`: for those who run the service."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from sqlalchemy import text

from remat_server.http.metrics import registry
from remat_server.http.routes.common import Store, only_problems, problems
from remat_server.problems import ServiceProblem

router = APIRouter(tags=["operation"])

_OPEN = {"security": []}
"""No key is needed, even where there are keys."""


class Health(BaseModel):
    """All is well; anything else is a problem document."""

    status: Literal["ok"] = "ok"


@router.get("/livez", responses=only_problems(400), openapi_extra=_OPEN)
async def livez() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", responses=only_problems(400, 503), openapi_extra=_OPEN)
def readyz(request: Request, store: Store) -> Health:
    """Requests can be served: the store is there, and the service is not being stopped."""
    if request.app.state.draining.is_set():
        raise ServiceProblem(503, "the service is being stopped")
    with store.read() as connection:
        connection.execute(text("SELECT 1"))
    return Health()


def _may_see(request: Request) -> None:
    gate = request.app.state.gate
    if gate.is_closed:
        gate.owner(request)


@router.get(
    "/metrics",
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics"},
        **problems(),
    },
)
def metrics(
    request: Request, store: Store, allowed: Annotated[None, Depends(_may_see)]
) -> Response:
    """Prometheus metrics. Where there are keys, one is needed."""
    with store.read() as connection:
        found = registry(connection, request.app.state.requests)
    return Response(generate_latest(found), headers={"Content-Type": CONTENT_TYPE_LATEST})
