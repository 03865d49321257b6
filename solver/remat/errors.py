"""The errors and warnings of remat.

A message states the fact, the probable cause and what to do, with numbers and units.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RematError(Exception):
    """Base class of all errors that remat raises on purpose."""


class GraphError(RematError, ValueError):
    """A graph, or a schedule for it, breaks a rule (cycle, negative size, unknown value)."""


class BudgetError(RematError, ValueError):
    """A budget cannot be read: wrong type, wrong unit, not positive."""


class InfeasibleBudget(RematError):
    """No schedule fits the budget.

    `min_feasible_bytes` is the smallest peak for which a schedule was found, in the graph's size
    unit (bytes for traced models). `is_proved` is true if no schedule of the graph's order can fit
    (see `BoundScope`), false if none was found.
    """

    def __init__(
        self, message: str, *, min_feasible_bytes: int | None = None, is_proved: bool = False
    ) -> None:
        super().__init__(message)
        self.min_feasible_bytes = min_feasible_bytes
        self.is_proved = is_proved

    def __reduce__(self) -> tuple[object, ...]:
        return (_infeasible_budget, (str(self), self.min_feasible_bytes, self.is_proved))

    def with_hint(self, hint: str) -> InfeasibleBudget:
        """Return the error with one more sentence in its message."""
        message = f"{str(self).removesuffix('.')}. {hint}."
        return _infeasible_budget(message, self.min_feasible_bytes, self.is_proved)


def _infeasible_budget(
    message: str, min_feasible_bytes: int | None, is_proved: bool = False
) -> InfeasibleBudget:
    return InfeasibleBudget(message, min_feasible_bytes=min_feasible_bytes, is_proved=is_proved)


class SolverTimeout(RematError):
    """The time limit passed before the solver found a schedule within the budget."""


class SolverError(RematError):
    """A solver backend is missing, unlicensed, or stopped without an answer, and no schedule was
    found without it."""


class SolverWarning(UserWarning):
    """A solver backend, or a part of the search, failed. The plan is the best that was found
    without it, and fits its budget. `Plan.stats` has the reason: `"solver_error"` of the backend,
    `"search_error"` of the search."""


class BudgetWarning(UserWarning):
    """No plan fits the budget. With `infeasible="smallest"`, the step is planned for the smallest
    feasible peak."""


class HookWarning(UserWarning):
    """Hooks of modules inside a model changed nothing: they ran while it was captured, and do not
    run in its steps."""


class UnknownName(RematError, KeyError):
    """No operation and no module of a plan has this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would quote it


class OutputNotComputed(RematError, AttributeError):
    """An output was used that a step planned with `outputs="loss"` does not return."""


class TraceError(RematError):
    """The model cannot be captured; the message names the place and the remedy."""


def no_loss_returned(model: str) -> TraceError:
    """Return the error for `outputs="loss"` where no output is a scalar with a gradient."""
    return TraceError(
        'outputs="loss" needs a model that returns its loss, and no returned output of '
        f"{model} that gradients come from is a scalar: compute the loss in the model (in "
        'Transformers, pass labels), or use outputs="dropped"'
    )


class GuardError(RematError):
    """A call differs from what the plan assumed, in a way that a replan cannot handle."""


class DocumentError(RematError, ValueError):
    """A Trace, Plan or Program document is truncated, forged, or of another version."""


class ServiceError(RematError):
    """The service cannot be reached, refuses the request, or fails."""


def wrong_type(function: str, expected: str, value: object, remedy: str) -> TypeError:
    """Return the error for an object that `function` cannot use: it needs `expected`. `remedy` says
    what to pass instead."""
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    got = "None" if value is None else f"{article} {kind}"
    return TypeError(f"{function} needs {expected}; got {got}: {remedy}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception of other code as one line: its type, and its message up to `limit`
    characters."""
    words = " ".join(str(error).split())
    if len(words) > limit:
        words = words[:limit].rsplit(" ", 1)[0] + " ..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def similar_names_hint(name: str, names: Iterable[str], lead: str = "; near are ") -> str:
    """Return the most similar of `names`, after `lead`; "" if none is similar."""
    matches = get_close_matches(name, list(names), n=3)
    return f"{lead}{', '.join(matches)}" if matches else ""
