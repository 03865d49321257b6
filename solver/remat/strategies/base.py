"""The interface of a strategy.

A strategy is a frozen dataclass whose fields are its options, with one method, `run`. It need not
be trusted: `remat.solve` simulates every schedule that it returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, cast

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.heuristics.peak_bounds import largest_operation
from remat.limits.budget import missing_percent_sign_hint, share_of_baseline
from remat.limits.units import format_bytes
from remat.progress import Cancel, Clock, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import baseline_of
from remat.solution import Solution

_LEAST_SOLVE_S = 0.1
"""The least time limit of a solve, also after the end of its clock."""


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
    """Return the strategy with options, such as `time_limit` or `threads`, of at most these values.
    Options that it does not have are left out; a strategy that is no dataclass is unchanged."""
    if not is_dataclass(strategy):
        return strategy
    options: dict[str, Any] = {
        f.name: min(limits[f.name], value)
        for f in fields(strategy)
        if f.name in limits and isinstance(value := getattr(strategy, f.name), int | float)
    }
    return replace(strategy, **options)


def clock_of(strategy: Strategy, cancel: Cancel | None = None) -> Clock:
    """Return a clock with the time limit of a strategy; without an end if it has none."""
    limit_s = getattr(strategy, "time_limit", None)
    return Clock.of(limit_s if isinstance(limit_s, int | float) else math.inf, cancel)


def within_clock(strategy: Strategy, clock: Clock, share: float = 1.0) -> Strategy:
    """Return the strategy with a time limit of at most this share of the time that is left, and at
    least 0.1 s."""
    return with_limits(strategy, time_limit=max(_LEAST_SOLVE_S, share * clock.remaining_s))


def checked_strategy(strategy: object) -> Strategy:
    """Return `strategy`. Raises ValueError for an object that is no instance of a strategy."""
    is_class = isinstance(strategy, type)
    if is_class or not hasattr(strategy, "run"):
        kind = f"the class {strategy.__name__}" if is_class else f"a {type(strategy).__name__}"
        raise ValueError(
            f"strategy is {kind}; pass an instance, such as remat.Auto() or remat.Exact()"
        )
    return cast(Strategy, strategy)


def infeasible(
    graph: Graph, budget_bytes: int, smallest_bytes: int, reason: str, *, proved: bool
) -> InfeasibleBudget:
    """Return the error for a budget: `reason` says why, and `smallest_bytes` is the smallest peak
    found. `proved` means that no schedule fits."""
    baseline_bytes = baseline_of(graph).peak_bytes
    share = missing_percent_sign_hint(budget_bytes, baseline_bytes)
    smallest_share = share_of_baseline(
        smallest_bytes, baseline_bytes=baseline_bytes, library_bytes=graph.library_bytes
    )
    largest = _largest_operation_text(graph)
    verdict = "is proved infeasible" if proved else "seems to be too small"
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget_bytes)} ({budget_bytes:,} bytes) {verdict}: {reason}; "
        f"the smallest peak found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes), "
        f"{smallest_share:.1%} of the peak without recomputation, {format_bytes(baseline_bytes)} "
        f"({baseline_bytes:,} bytes). Pass a budget of at least {smallest_bytes:,} bytes "
        f'or "min", or make the batch smaller{share}.{largest}',
        min_feasible_bytes=smallest_bytes,
        is_proved=proved,
    )


def _largest_operation_text(graph: Graph) -> str:
    """Return a sentence that names the operation which needs most; "" for an empty graph."""
    size_bytes, op = largest_operation(graph)
    if op is None:
        return ""
    operation = graph.operations[op]
    phase = "backward" if operation.backward else "forward"
    module = f", {operation.module}" if operation.module else ""
    return (
        f" {operation.name} ({phase}{module}) needs most of all operations: "
        f"{format_bytes(size_bytes)} with parameters and what has to be live then."
    )
