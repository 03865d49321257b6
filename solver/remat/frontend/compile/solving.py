"""Solving of a compiled step's graph in the time that planning leaves for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

from remat.errors import SolverTimeout
from remat.frontend.common.planning_line import planning_line
from remat.graph import Graph
from remat.plan import Plan
from remat.progress import ProgressCallback
from remat.solve import solve
from remat.strategies import Auto, Strategy
from remat.strategies.base import with_limits

_MIN_SOLVE_S = 2.0
"""Time for a solve, however long the capture of the kernels took."""

_CAPTURES_PER_COMPILATION = 4
"""A lower bound of the time of torch.compile for a graph, in times of the capture of its kernels.
torch.compile also generates and compiles their code."""


@dataclass(frozen=True)
class GraphSolver:
    """The solver of one compiled graph's variants.

    `planning_s` is the time for planning, counted from `started_s` (`time.perf_counter()`); None if
    the strategy has a time limit of its own. `cost_source` describes the costs in the plan.
    """

    strategy: Strategy
    planning_s: float | None
    started_s: float
    progress: ProgressCallback | bool | None
    cost_source: str

    def solve(self, graph: Graph, budget: int | str, *, num_remaining: int = 1) -> Plan:
        """Solve a graph for a budget in bytes or "min".

        `num_remaining` variants, this one included, share the time that is left. If it is too short
        for any schedule, as the capture of a large graph took most of it, the solver gets
        `planning_s` once more.
        """
        if self.planning_s is None:
            return self.solve_within(graph, budget, None)
        remaining_s = self.planning_s - (time.perf_counter() - self.started_s)
        limit_s = max(_MIN_SOLVE_S, remaining_s / num_remaining)
        try:
            return self.solve_within(graph, budget, limit_s)
        except SolverTimeout:
            if limit_s >= self.planning_s:
                raise
            return self.solve_within(graph, budget, self.planning_s)

    def solve_within(self, graph: Graph, budget: int | str, limit_s: float | None) -> Plan:
        """Solve a graph within `limit_s` seconds, or the strategy's own limit if that is None."""
        settings = _SettingsOutsideCacheKey(self.progress, limit_s)
        return solve_cached(graph, budget, self.strategy, settings, self.cost_source)


@dataclass(frozen=True)
class PiecesTime:
    """The time limit for plans of a graph in pieces, after the plan of the whole graph.

    The capture of the whole graph took `capture_s`, and it has `num_operations`. The captures in
    pieces begin at `started_s`. Together they may take the time limit of the strategy plus the
    expected time of compiling the whole graph. Each solve may take half of the time limit.
    """

    strategy: Strategy
    started_s: float
    capture_s: float
    num_operations: int

    def is_enough(self, num_operations: int, solves_s: float) -> bool:
        """True if the remaining time is enough to capture a graph with this many operations.
        `solves_s` is the time of earlier solves, which does not count."""
        capture_s = self.capture_s * num_operations / max(1, self.num_operations)
        elapsed_s = time.perf_counter() - self.started_s - solves_s
        limit_s = self._limit_s() + _CAPTURES_PER_COMPILATION * self.capture_s
        return elapsed_s + capture_s <= limit_s

    def limited_strategy(self) -> Strategy:
        """Return the strategy with the time limit of one solve."""
        return with_limits(self.strategy, time_limit=max(_MIN_SOLVE_S, self._limit_s() / 2))

    def _limit_s(self) -> float:
        return getattr(self.strategy, "time_limit", 0.0)


@dataclass(frozen=True)
class _SettingsOutsideCacheKey:
    """The time limit of a solve and who receives its progress. All instances are equal, so that the
    cache of plans ignores them."""

    progress: ProgressCallback | bool | None = field(default=None, compare=False)
    limit_s: float | None = field(default=None, compare=False)

    @contextmanager
    def progress_callback(self) -> Iterator[ProgressCallback | None]:
        """Yield the progress callback of `remat.solve`."""
        with planning_line(self.progress) as callback:
            yield callback


@lru_cache(maxsize=32)
def solve_cached(
    graph: Graph,
    budget: int | str,
    strategy: Strategy,
    settings: _SettingsOutsideCacheKey,
    cost_source: str,
) -> Plan:
    """Solve a graph. Identical blocks that torch compiles separately are solved once."""
    if settings.limit_s is not None:
        strategy = replace(cast(Auto, strategy), time_limit=settings.limit_s)
    with settings.progress_callback() as callback:
        plan = solve(graph, budget, strategy, progress=callback)
    return replace(plan, stats={**plan.stats, "cost_source": cost_source})
