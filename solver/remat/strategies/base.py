"""The interface of a strategy.

A strategy is a frozen dataclass whose fields are its options, with one method, `run`. It need not
be trusted: `remat.solve` simulates every schedule that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast

from remat.graph import Graph
from remat.progress import Cancel, ProgressCallback
from remat.schedule import Schedule
from remat.solution import Solution


@dataclass(frozen=True, slots=True)
class Task:
    """A problem for a strategy: find a schedule of `graph` with a peak of at most `budget_bytes`,
    constant memory included, or with the smallest peak if that is None.

    `start` is a schedule that is known to fit, to start from. `progress` is called with a
    `Progress` from time to time; once `cancel` is set, the best schedule so far is to be returned.
    """

    graph: Graph
    budget_bytes: int | None = None
    start: Schedule | None = None
    progress: ProgressCallback | None = None
    cancel: Cancel | None = None


class Strategy(Protocol):
    """An algorithm that finds a schedule within a budget."""

    @property
    def name(self) -> str:
        """The strategy's name in `Plan.stats`."""
        ...

    def run(self, task: Task) -> Solution:
        """Return a schedule for `task`. Raises `InfeasibleBudget` or `SolverTimeout`."""
        ...


def with_limits(strategy: Strategy, **limits: float) -> Strategy:
    """Return the strategy with options, such as `time_limit` or `threads`, of at most these
    values. Options that it does not have are left out."""
    if not is_dataclass(strategy):
        return strategy
    options: dict[str, Any] = {
        f.name: min(limits[f.name], value)
        for f in fields(strategy)
        if f.name in limits and isinstance(value := getattr(strategy, f.name), int | float)
    }
    return replace(strategy, **options)


def checked_strategy(strategy: object) -> Strategy:
    """Return `strategy`. Raises ValueError for an object that is no instance of a strategy."""
    is_class = isinstance(strategy, type)
    if is_class or not hasattr(strategy, "run"):
        kind = f"the class {strategy.__name__}" if is_class else f"a {type(strategy).__name__}"
        raise ValueError(
            f"strategy is {kind}; pass an instance, such as remat.Auto() or remat.Exact()"
        )
    return cast(Strategy, strategy)
