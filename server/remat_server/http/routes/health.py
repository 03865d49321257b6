"""`/livez`, `/readyz` and `/metrics`, for operators of the service."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from sqlalchemy import text

from remat_server.http.metrics import build_registry
from remat_server.http.routes.common import only_problems, problems
from remat_server.http.state import Store, request_state
from remat_server.problems import ServiceProblem

router = APIRouter(tags=["operation"])

_NO_KEY_NEEDED = {"security": []}
"""OpenAPI description of a route that needs no API key."""


class Health(BaseModel):
    """The response of a healthy service; any other response is a problem document."""

    status: Literal["ok"] = "ok"


@router.get("/livez", responses=only_problems(400), openapi_extra=_NO_KEY_NEEDED)
async def livez() -> Health:
    """Succeeds while the process responds."""
    return Health()


@router.get("/readyz", responses=only_problems(400, 503), openapi_extra=_NO_KEY_NEEDED)
def readyz(request: Request, store: Store) -> Health:
    """Succeeds while requests can be served: the store responds, and the service is not
    stopping."""
    if request_state(request).draining.is_set():
        raise ServiceProblem(503, "the service is shutting down")
    with store.read() as connection:
        connection.execute(text("SELECT 1"))
    return Health()


def _check_access(request: Request) -> None:
    access = request_state(request).access
    if access.requires_key:
        access.owner(request)


@router.get(
    "/metrics",
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics"},
        **problems(),
    },
)
def metrics(
    request: Request, store: Store, access_check: Annotated[None, Depends(_check_access)]
) -> Response:
    """Prometheus metrics. Needs an API key if the service has keys."""
    with store.read() as connection:
        registry = build_registry(connection, request_state(request).request_histogram)
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
