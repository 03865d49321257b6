"""RFC 9457 problem documents for errors, with stable `type` URIs.

Solving processes use this module too, and start faster without the web framework. Therefore the
responses with problem documents are in `remat_server.http.problem_responses`.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat.errors import InfeasibleBudget, RematError
from remat.service.wire import PROBLEM_TYPE_PREFIX, JobKind, ProblemDetails, problem_type_name

_MAX_DETAIL_LENGTH = 1900
"""Limit of a detail in characters, because it may quote the request."""

_NAMES_AND_TITLES_BY_STATUS = {
    400: ("bad-request", "The request is malformed"),
    401: ("unauthorized", "An API key is needed"),
    403: ("forbidden", "Access is forbidden"),
    404: ("not-found", "The resource does not exist"),
    405: ("method-not-allowed", "The method is not supported here"),
    406: ("not-acceptable", "The result has no such format"),
    408: ("too-slow", "The request took too long to arrive"),
    409: ("not-ready", "The job has no result"),
    411: ("length-required", "The request needs a Content-Length"),
    413: ("too-large", "The request is too large"),
    415: ("unsupported-media-type", "The format of the body is not supported"),
    422: ("invalid", "The request is invalid"),
    429: ("too-many", "Too many requests"),
    503: ("unavailable", "The service is temporarily unavailable"),
}

_TITLES_BY_NAME = {
    "budget": "The budget is malformed",
    "crashed": "The solve ended without an answer",
    "document": "The document is invalid",
    "graph": "The graph is invalid",
    "idempotency-key-reused": "The Idempotency-Key belongs to another request",
    "infeasible": "No schedule fits the budget",
    "internal": "The solve failed because of a bug",
    "memory": "The solve exceeded its memory limit",
    "no-device": "No worker has the device",
    "no-such-format": "The result has no such format",
    "solver": "The solver cannot be used",
    "timeout": "No schedule was found in time",
    "worker-lost": "The job's workers were lost",
}
"""Titles of problems with a more specific name than their status."""


class ServiceProblem(Exception):
    """An error in a request that the service answers with a problem document."""

    def __init__(
        self, status: int, detail: str, *, name: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers
        self.name = name


def make_problem(status: int, detail: str, name: str = "") -> ProblemDetails:
    """Return the problem document for a status; `name` is the last part of its `type`."""
    default_name, title = _NAMES_AND_TITLES_BY_STATUS.get(status, ("error", "The request failed"))
    title = _TITLES_BY_NAME.get(name, title)
    if len(detail) > _MAX_DETAIL_LENGTH:
        detail = detail[:_MAX_DETAIL_LENGTH] + "..."
    detail = detail.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
    return ProblemDetails(
        type=PROBLEM_TYPE_PREFIX + (name or default_name), title=title, status=status, detail=detail
    )


def out_of_memory_problem(kind: JobKind, limit_bytes: int) -> ProblemDetails:
    """Return the problem document for a solve that exceeded its memory limit."""
    remedy = "" if kind in ("fit", "why") else "use fewer slots (option near_slots), or "
    return make_problem(
        500,
        f"the solve exceeded its memory limit of {limit_bytes:,} bytes; {remedy}raise "
        "REMAT_SOLVE_MEMORY_BYTES",
        "memory",
    )


def problem_from_error(error: RematError, status: int = 422) -> ProblemDetails:
    """Return the problem document for a `RematError`; `ProblemDetails.exception` is the inverse."""
    document = make_problem(status, str(error), problem_type_name(error))
    if not isinstance(error, InfeasibleBudget):
        return document
    update = {"min_feasible_bytes": error.min_feasible_bytes, "is_proved": error.is_proved}
    return document.model_copy(update=update)
