"""Brute force over schedules of small graphs with copies to a host and back, by Dijkstra's
algorithm on explicit memory states.

Time is what is minimised. A state has the next first run, the next operation that may be recomputed
before it, the values in memory, the copies on the host, the copies that are on their way, and when
each of the two engines is free. Copies start whenever there is something to copy, also of values
that were recomputed; the device's memory is free when a copy to the host has ended, and taken when
a copy back starts. This allows more than remat's plans do, and shares no code with them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from remat.costs.devices import Link
from remat.graph import Graph


class _State(NamedTuple):
    """Times are seconds from now; 0 for what has ended. `leaving`, `arriving` and `on_host` are
    sorted pairs of a value and the time at which its copy ends."""

    first: int
    recomputable: int
    resident: frozenset[int]
    leaving: tuple[tuple[int, float], ...] = ()
    on_host: frozenset[int] = frozenset()
    arriving: tuple[tuple[int, float], ...] = ()
    out_free_s: float = 0.0
    in_free_s: float = 0.0


def cheapest_with_offload(
    graph: Graph, budget_bytes: int, link: Link, values: frozenset[int], host_bytes: int
) -> float | None:
    """Return the shortest time of a step within the budgets in which any of `values` may be
    offloaded, or None if there is none."""
    start = _State(0, 0, frozenset())
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    number = 0
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if so_far > best[state]:
            continue
        if state.first == len(graph):
            return so_far
        for spent_s, after in _moves(graph, state, budget_bytes, link, values, host_bytes):
            total = so_far + spent_s
            if total < best.get(after, float("inf")) - 1e-12:
                best[after] = total
                number += 1
                heapq.heappush(queue, (total, number, after))
    return None


def _moves(
    graph: Graph,
    state: _State,
    budget_bytes: int,
    link: Link,
    values: frozenset[int],
    host_bytes: int,
) -> Iterator[tuple[float, _State]]:
    size = [value.size_bytes for value in graph.values]
    leaving = {v for v, _ in state.leaving}
    arriving = {v for v, _ in state.arriving}
    used = graph.constant_bytes + sum(size[v] for v in state.resident | arriving)
    for v in state.resident - graph.results - leaving:
        yield 0.0, state._replace(resident=state.resident - {v})
    pending = [end for _, end in (*state.leaving, *state.arriving)]
    if pending:
        yield min(pending), _later(state, min(pending))
    on_host_bytes = sum(size[v] for v in state.on_host | leaving)
    for v in (state.resident & values) - state.on_host - leaving:
        if size[v] and on_host_bytes + size[v] <= host_bytes:
            end = state.out_free_s + size[v] / link.to_host_bytes_per_s
            after = tuple(sorted((*state.leaving, (v, end))))
            yield 0.0, state._replace(leaving=after, out_free_s=end)
    for v in state.on_host - state.resident - arriving:
        if used + size[v] <= budget_bytes:
            end = state.in_free_s + size[v] / link.to_device_bytes_per_s
            after = tuple(sorted((*state.arriving, (v, end))))
            yield 0.0, state._replace(arriving=after, in_free_s=end)
    for op in range(state.recomputable, state.first + 1):
        operation = graph.operations[op]
        if not state.resident.issuperset(operation.inputs) or arriving & set(operation.outputs):
            continue
        if op < state.first and not operation.recomputable:
            continue
        new = sum(size[v] for v in operation.outputs) + operation.workspace_bytes
        if used + new > budget_bytes:
            continue
        place = (state.first + 1, 0) if op == state.first else (state.first, op + 1)
        after = _later(state, operation.cost_s)
        yield (
            operation.cost_s,
            after._replace(
                first=place[0],
                recomputable=place[1],
                resident=after.resident | set(operation.outputs),
            ),
        )


def _later(state: _State, seconds: float) -> _State:
    """Return the state after some time. A value whose copy has left stays until it is dropped."""
    left = frozenset(v for v, end in state.leaving if end <= seconds)
    arrived = frozenset(v for v, end in state.arriving if end <= seconds)
    return state._replace(
        resident=state.resident | arrived,
        leaving=tuple((v, end - seconds) for v, end in state.leaving if end > seconds),
        on_host=state.on_host | left,
        arriving=tuple((v, end - seconds) for v, end in state.arriving if end > seconds),
        out_free_s=max(0.0, state.out_free_s - seconds),
        in_free_s=max(0.0, state.in_free_s - seconds),
    )
