"""Everything remat raises on purpose.

A message states the fact, the probable cause and what to do, with numbers and units.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RematError(Exception):
    """Base class of every error that remat raises on purpose."""


class GraphError(RematError, ValueError):
    """A graph, or a schedule for it, breaks a rule (cycle, negative size, unknown value)."""


class BudgetError(RematError, ValueError):
    """A budget that cannot be read: wrong type, wrong unit, not positive."""


class InfeasibleBudget(RematError):
    """No schedule fits the budget.

    `min_feasible_bytes` is the smallest peak for which a schedule was found, in the graph's size
    unit (bytes for traced models). `is_proved` says whether no schedule of the graph's order can
    fit (`BoundScope` says what that is), or merely none was found.
    """

    def __init__(
        self, message: str, *, min_feasible_bytes: int | None = None, is_proved: bool = False
    ) -> None:
        super().__init__(message)
        self.min_feasible_bytes = min_feasible_bytes
        self.is_proved = is_proved

    def __reduce__(self) -> tuple[object, ...]:
        return (_infeasible, (str(self), self.min_feasible_bytes, self.is_proved))


def _infeasible(
    message: str, min_feasible_bytes: int | None, is_proved: bool = False
) -> InfeasibleBudget:
    return InfeasibleBudget(message, min_feasible_bytes=min_feasible_bytes, is_proved=is_proved)


class SolverTimeout(RematError):
    """The time limit passed before the solver knew any schedule within the budget."""


class SolverError(RematError):
    """A solver backend is missing, unlicensed, or stopped without an answer, and no schedule is
    known without it."""


class SolverWarning(UserWarning):
    """A solver backend, or a part of the search, failed on the way. The plan is the best that is
    known without it, and fits its budget. `Plan.stats` say why: `"solver_error"` of the backend,
    `"search_error"` of the search."""


class HookWarning(UserWarning):
    """Hooks of modules inside of a model only looked: they ran while it was captured, and do not
    run in its steps."""


class UnknownName(RematError, KeyError):
    """No operation and no module of a plan has this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would quote it


class TraceError(RematError):
    """The model cannot be captured; the message names the place and the remedy."""


class GuardError(RematError):
    """A call differs from what the plan assumed, in a way that cannot be planned anew."""


class DocumentError(RematError, ValueError):
    """A Trace, Plan or Program document is truncated, forged, or of another version."""


class ServiceError(RematError):
    """The service cannot be reached, refuses the request, or fails."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Somebody else's exception as one line: its type, and the beginning of its message."""
    words = " ".join(str(error).split())
    if len(words) > limit:
        words = words[:limit].rsplit(" ", 1)[0] + " ..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def nearest(name: str, known: Iterable[str], lead: str = "; near are ") -> str:
    """The known names that are most like this one, after `lead`; "" where none is like it."""
    near = get_close_matches(name, list(known), n=3)
    return f"{lead}{', '.join(near)}" if near else ""
