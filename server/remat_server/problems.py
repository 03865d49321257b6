"""Errors as RFC 9457 problem documents, with stable `type` URIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from remat.errors import InfeasibleBudget, RematError
from remat.wire import PROBLEMS, Problem, problem_name

MEDIA_TYPE = "application/problem+json"

_LONGEST = 1900
"""Characters of a detail: it may quote what was posted."""

_TITLES = {
    400: ("bad-request", "The request cannot be read"),
    401: ("unauthorized", "An API key is needed"),
    403: ("forbidden", "This is not allowed"),
    404: ("not-found", "There is no such thing"),
    405: ("method-not-allowed", "This method is not offered here"),
    406: ("not-acceptable", "No such form of the result"),
    409: ("not-ready", "The job has no result"),
    411: ("length-required", "The length of the body is needed"),
    413: ("too-large", "The request is too large"),
    415: ("unsupported-media-type", "This kind of body is not understood"),
    422: ("invalid", "The request is wrong"),
    429: ("too-many", "Too many requests"),
    503: ("unavailable", "The service cannot do this now"),
}

_NAMED = {
    "budget": "The budget cannot be read",
    "crashed": "The solve ended without an answer",
    "document": "The document is wrong",
    "graph": "The graph is wrong",
    "internal": "The solve met a bug",
    "infeasible": "No schedule fits the budget",
    "memory": "The solve needed too much memory",
    "solver": "The solver cannot be used",
    "timeout": "No schedule was found in time",
    "worker-lost": "The job's workers were lost",
}
"""Titles of problems that are more than their status."""


class ServiceProblem(Exception):
    """Raised anywhere in a request, answered as a problem document."""

    def __init__(
        self, status: int, detail: str, *, name: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers
        self.name = name


def problem(status: int, detail: str, name: str = "") -> Problem:
    """The document for a status; `name` is the last part of its type."""
    usual, title = _TITLES.get(status, ("error", "The request failed"))
    title = _NAMED.get(name, title)
    if len(detail) > _LONGEST:
        detail = detail[:_LONGEST] + "..."
    detail = detail.encode(errors="replace").decode()  # half a surrogate pair is no UTF-8
    return Problem(type=PROBLEMS + (name or usual), title=title, status=status, detail=detail)


def answer(
    status: int, detail: str, name: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """The problem as a response."""
    document = problem(status, detail, name).model_dump(exclude_none=True)
    return JSONResponse(document, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def out_of_memory(limit_bytes: int) -> Problem:
    """The document for a solve that needed more memory than it may take."""
    return problem(
        500,
        f"the solve needed more memory than the {limit_bytes:,} bytes that a solve may take here; "
        "offer fewer slots (option near_slots), or raise REMAT_SOLVE_MEMORY_BYTES",
        "memory",
    )


def of_error(error: RematError, status: int = 422) -> Problem:
    """The document for an exception of the library; `Problem.exception` is the inverse."""
    found = problem(status, str(error), problem_name(error))
    if not isinstance(error, InfeasibleBudget):
        return found
    least = {"min_feasible_bytes": error.min_feasible_bytes, "is_proved": error.is_proved}
    return found.model_copy(update=least)


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
