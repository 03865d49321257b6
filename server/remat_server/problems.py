"""Errors as RFC 9457 problem documents, with stable `type` URIs.

Solving processes make them too, and start faster without the web framework: what answers requests
with them is in `remat_server.http.problem_responses`.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat.errors import InfeasibleBudget, RematError
from remat.service.wire import PROBLEMS, Problem, problem_name

_LONGEST = 1900
"""Characters of a detail: it may quote what was posted."""

_TITLES = {
    400: ("bad-request", "The request cannot be read"),
    401: ("unauthorized", "An API key is needed"),
    403: ("forbidden", "This is not allowed"),
    404: ("not-found", "There is no such thing"),
    405: ("method-not-allowed", "This method is not offered here"),
    406: ("not-acceptable", "No such form of the result"),
    408: ("too-slow", "The request took too long to come"),
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
