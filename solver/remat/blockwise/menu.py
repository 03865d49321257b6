"""The ways to run a block, found by solving it for a range of room.

A block's schedule matters to the others by what it saves and by how much it needs when it runs. A
budget for the block alone says the second only. So room is asked for where the forward ends: with
a workspace of `w` there, a schedule within a budget `b` saves at most `b - w`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace

from remat.blockwise.step import Way
from remat.errors import SolverTimeout
from remat.graph import Graph
from remat.plan import Plan
from remat.progress import ProgressCallback
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.solve import sweep
from remat.strategies import Auto, Strategy

_ROOMS = (1.0, 0.6, 0.35, 0.15)
"""Of the block's own peak: how much more it may need in its backward than it saved."""

_SAVED = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Of what the block saves without recomputation."""

_LEAST_S = 0.1
_LONGEST_S = 1.0
"""For a solve."""


def menu(
    graph: Graph,
    within_s: float,
    strategy: Strategy | None = None,
    progress: ProgressCallback | None = None,
) -> list[tuple[Way, Plan]]:
    """The ways that no other is better than, the fastest first; the first runs all once. Found
    within about so many seconds, if the strategy has a time limit."""
    keep_all = Schedule.keep_all(graph)
    first = way_of(graph, keep_all)
    peak_bytes = simulate(graph, keep_all).peak_bytes
    found = [(first, Plan.of(graph, peak_bytes, Solution(keep_all), {"strategy": "all kept"}))]
    limit_s = min(_LONGEST_S, max(_LEAST_S, within_s / len(_ROOMS) / len(_SAVED)))
    strategy = _limited(strategy or Auto(gap=0.01), limit_s)
    own_bytes = max(first.forward_bytes, first.backward_bytes)
    for room in _ROOMS:
        w = int(room * own_bytes)
        least_bytes = graph.constant_bytes + tangent_bytes(graph) + w
        budgets = [least_bytes + int(share * first.saved_bytes) for share in _SAVED]
        for plan in _frontier(with_room(graph, w), budgets, strategy, progress):
            peak_bytes = simulate(graph, plan.schedule).peak_bytes
            own = Plan.of(graph, peak_bytes, Solution(plan.schedule), dict(plan.stats))
            found.append((way_of(graph, plan.schedule), own))
    return efficient(found)


def _frontier(
    graph: Graph,
    budgets: Sequence[int],
    strategy: Strategy,
    progress: ProgressCallback | None,
) -> list[Plan]:
    """The plans for those budgets, smallest first, for which one is found in time."""
    for first in range(len(budgets)):
        with suppress(SolverTimeout):
            return sweep(graph, budgets[first:], strategy, progress=progress)
    return []


def way_of(graph: Graph, schedule: Schedule) -> Way:
    """What a schedule of a block means to the other blocks. What is constant in the block (its
    parameters and inputs) is not counted."""
    assert graph.boundary is not None
    timeline = simulate(graph, schedule)
    border = schedule.runs.index(graph.boundary)
    constant_bytes = graph.constant_bytes
    # Until there the graph holds what the block returned, which from there on others hold.
    after = timeline.during_bytes[border + 1 :]
    begun_bytes = timeline.after_bytes[border] - constant_bytes
    return Way(
        time_s=timeline.time_s,
        saved_bytes=begun_bytes - tangent_bytes(graph),
        forward_bytes=max(timeline.during_bytes[:border], default=constant_bytes) - constant_bytes,
        backward_bytes=max(after, default=constant_bytes) - constant_bytes,
    )


def with_room(graph: Graph, size_bytes: int) -> Graph:
    """The graph with so much more needed where the forward has ended."""
    assert graph.boundary is not None
    operations = list(graph.operations)
    own = operations[graph.boundary]
    operations[graph.boundary] = replace(own, workspace_bytes=own.workspace_bytes + size_bytes)
    return replace(graph, operations=tuple(operations))


def tangent_bytes(graph: Graph) -> int:
    """Of the gradients that a block's backward begins with."""
    assert graph.boundary is not None
    return sum(graph.values[v].size_bytes for v in graph.operations[graph.boundary].outputs)


def efficient(found: Iterable[tuple[Way, Plan]]) -> list[tuple[Way, Plan]]:
    """Those to which no other is at least equal in everything, the fastest first."""
    kept: list[tuple[Way, Plan]] = []
    for way, plan in sorted(found, key=lambda pair: _numbers(pair[0])):
        if not any(_is_covered(way, better) for better, _ in kept):
            kept.append((way, plan))
    return kept


def _limited(strategy: Strategy, limit_s: float) -> Strategy:
    own_s = getattr(strategy, "time_limit", None)
    if not is_dataclass(strategy) or not isinstance(own_s, int | float):
        return strategy
    return replace(strategy, time_limit=min(own_s, limit_s))


def _numbers(way: Way) -> tuple[float, int, int, int]:
    return way.time_s, way.saved_bytes, way.backward_bytes, way.forward_bytes


def _is_covered(way: Way, better: Way) -> bool:
    return all(b <= w for b, w in zip(_numbers(better), _numbers(way), strict=True))
