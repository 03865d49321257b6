"""Brute force over schedules of small graphs, by Dijkstra's algorithm on explicit memory states.

A state is (next first run, next operation that may be recomputed before it, resident values). It
shares no code with the program or the simulator: values are dropped one at a time, whenever that
pays, and a set has what is in memory.

The space is Checkmate's: between two first runs any earlier operations may be recomputed, each
at most once, in the graph's order. `free=True` leaves out the second part of the state, so that
operations are recomputed in any order and any number of times. That space is a strict superset:
of 400 random graphs of up to 6 operations, one had a smaller peak in it; none had a lower cost
at the smallest peak of Checkmate's space.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import combinations

from remat.graph import Graph

_State = tuple[int, int, frozenset[int]]


def cheapest(graph: Graph, budget_bytes: int, *, free: bool = False) -> float | None:
    """Return the shortest time of a schedule within the budget, or None if there is none."""
    return _search(graph, budget_bytes, free=free, by_peak=False)


def smallest_budget(graph: Graph, *, free: bool = False) -> int:
    """Return the smallest peak of any schedule."""
    peak = _search(graph, None, free=free, by_peak=True)
    assert peak is not None
    return int(peak)


def _search(graph: Graph, budget: int | None, *, free: bool, by_peak: bool) -> float | None:
    start: _State = (0, 0, frozenset())
    best: dict[_State, float] = {start: 0.0}
    queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    number = 0
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if so_far > best[state]:
            continue
        if state[0] == len(graph):
            return so_far
        for cost, peak, after in _moves(graph, state, free):
            if budget is not None and peak > budget:
                continue
            total = max(so_far, peak) if by_peak else so_far + cost
            if total < best.get(after, float("inf")):
                best[after] = total
                number += 1
                heapq.heappush(queue, (total, number, after))
    return None


def _moves(graph: Graph, state: _State, free: bool) -> Iterator[tuple[float, int, _State]]:
    """Yield (time, bytes in memory during it, next state) of every possible next action."""
    first, recomputable, resident = state
    for value in resident - graph.results:
        yield 0.0, 0, (first, recomputable, resident - {value})
    for op in range(0 if free else recomputable, first):
        if _is_locked(graph, op, first):
            continue
        if graph.operations[op].recomputable and resident.issuperset(graph.operations[op].inputs):
            yield _run(graph, op, resident, (first, 0 if free else op + 1))
    if resident.issuperset(graph.operations[first].inputs):
        over = graph.operations[first].overwrites
        for count in range(len(over) + 1):
            for written in combinations(over, count):
                yield _run(graph, first, resident, (first + 1, 0), frozenset(written))


def _is_locked(graph: Graph, op: int, first: int) -> bool:
    """True if a later operation needs a copy that this operation made before: `first` is next."""
    for later in graph.operations[first:]:
        since = later.same_copy_as
        if 0 <= since < first:
            shared = set(later.inputs) & set(graph.operations[since].inputs)
            if shared & (set(graph.operations[op].outputs) - set(graph.operations[op].renews)):
                return True
    return False


def _run(
    graph: Graph,
    op: int,
    resident: frozenset[int],
    place: tuple[int, int],
    over: frozenset[int] = frozenset(),
) -> tuple[float, int, _State]:
    operation = graph.operations[op]
    memory = (
        graph.constant_bytes
        + sum(graph.values[v].size_bytes for v in resident - over)
        + sum(graph.values[v].size_bytes for v in operation.outputs)
        + operation.workspace_bytes
    )
    return operation.cost_s, memory, (*place, resident - over | set(operation.outputs))
