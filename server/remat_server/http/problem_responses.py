"""Error responses: exception handlers that answer with problem documents."""

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
from remat_server.http.state import app_state
from remat_server.problems import ServiceProblem, make_problem, problem_from_error

MEDIA_TYPE = "application/problem+json"


def problem_response(
    status: int, detail: str, name: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a problem document."""
    document = make_problem(status, detail, name).model_dump(exclude_none=True)
    return JSONResponse(document, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def install_exception_handlers(app: FastAPI) -> None:
    """Answer every error of the application with a problem document."""

    @app.exception_handler(ServiceProblem)
    async def service_problem(request: Request, error: ServiceProblem) -> Response:
        return problem_response(error.status, error.detail, error.name, error.headers)

    @app.exception_handler(RematError)
    async def library_error(request: Request, error: RematError) -> Response:
        document = problem_from_error(error).model_dump(exclude_none=True)
        return JSONResponse(document, 422, media_type=MEDIA_TYPE)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        headers = dict(error.headers or {})
        path = request.scope["path"][:200]
        if error.status_code == 404:
            detail = f"there is no resource at {path}; /docs lists the resources"
        if error.status_code == 405:
            all_routes = app_state(app).routes
            routes = [r for r in all_routes if r.path_regex.match(request.scope["path"])]
            methods = sorted({method for route in routes for method in route.methods})
            headers["Allow"] = ", ".join(methods) or headers.get("Allow") or "GET, HEAD"
            detail = f"{path} supports {headers['Allow']}, not {request.method[:20]}"
        return problem_response(error.status_code, detail, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first: dict[str, Any] = dict(error.errors()[0]) if error.errors() else {}
        location = ".".join(str(part) for part in first.get("loc", ()))
        return problem_response(422, f"{location[:200]}: {first.get('msg', 'is invalid')}")

    @app.exception_handler(OperationalError)
    async def store_unavailable(request: Request, error: OperationalError) -> Response:
        structlog.get_logger().error("the job store does not respond", error=str(error.orig)[:300])
        return problem_response(
            503, "the job store does not respond; try again", headers={"Retry-After": "5"}
        )

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        structlog.get_logger().error("unhandled error", exc_info=error, path=request.url.path)
        return problem_response(
            500, "this is a bug in the service; its log has the traceback with the request's id"
        )
