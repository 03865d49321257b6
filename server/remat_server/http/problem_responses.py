"""Problem documents as responses, for every error that can leave the application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from remat.errors import RematError
from remat_server.problems import ServiceProblem, of_error, problem

MEDIA_TYPE = "application/problem+json"


def answer(
    status: int, detail: str, name: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """The problem as a response."""
    document = problem(status, detail, name).model_dump(exclude_none=True)
    return JSONResponse(document, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Let every error of the application leave as a problem document."""

    @app.exception_handler(ServiceProblem)
    async def service_problem(request: Request, error: ServiceProblem) -> Response:
        return answer(error.status, error.detail, error.name, error.headers)

    @app.exception_handler(RematError)
    async def library_error(request: Request, error: RematError) -> Response:
        document = of_error(error).model_dump(exclude_none=True)
        return JSONResponse(document, 422, media_type=MEDIA_TYPE)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        headers = dict(error.headers or {})
        path = request.scope["path"][:200]
        if error.status_code == 404:
            detail = f"there is nothing at {path}; /docs lists what is"
        if error.status_code == 405:
            routes = [r for r in app.state.routes if r.path_regex.match(request.scope["path"])]
            methods = sorted({method for route in routes for method in route.methods})
            headers["Allow"] = ", ".join(methods) or headers.get("Allow") or "GET, HEAD"
            detail = f"{path} takes {headers['Allow']}, not {request.method[:20]}"
        return answer(error.status_code, detail, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first: dict[str, Any] = dict(error.errors()[0]) if error.errors() else {}
        where = ".".join(str(part) for part in first.get("loc", ()))
        return answer(422, f"{where[:200]}: {first.get('msg', 'is wrong')}")

    @app.exception_handler(OperationalError)
    async def store_is_gone(request: Request, error: OperationalError) -> Response:
        structlog.get_logger().error("the store does not answer", error=str(error.orig)[:300])
        return answer(503, "the job store does not answer; try again", headers={"Retry-After": "5"})

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        structlog.get_logger().error("unhandled error", exc_info=error, path=request.url.path)
        return answer(500, "this is a bug of the service; its log has the request's id")
