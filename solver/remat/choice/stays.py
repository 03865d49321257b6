"""From a solution of the relaxation to stays on the host, by the names of tensors."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from remat.graph import Graph
from remat.milp.checkpoint_cuts import OffloadCut
from remat.passes.offload.copies_in_graph import HostStay


class PlannedStays(NamedTuple):
    """Stays on the host, and the seconds of recomputation that are expected before operations."""

    stays: tuple[HostStay, ...]
    recomputed_s: dict[str, float]


def stays_of_cut(
    graph: Graph, cut: OffloadCut, values: dict[int, str], budget_bytes: int
) -> PlannedStays:
    """Return the stays of the values that the cut's solution offloads. `values` has the names of
    their tensors.

    A tensor has left the device by the cut, or earlier where the memory before would exceed the
    budget. It is back before the first operation that reads it, or for which an operation that
    reads it is recomputed. Values that nothing reads after the cut are left out.
    """
    needed_by = _needs(graph, cut)
    gone_by = _departures(graph, cut, budget_bytes)
    until = node_name(graph, cut.operation)
    stays: list[HostStay] = []
    for value in sorted(cut.offloaded):
        needed = _need_of_value(graph, cut, value, needed_by)
        if needed == math.inf:
            continue
        name = node_name(graph, int(needed))
        gone = node_name(graph, gone_by[value])
        stays.append(HostStay(values[value], gone, until, name))
    recomputed_s: dict[str, float] = {}
    for op, needed in needed_by.items():
        if needed < math.inf:
            name = node_name(graph, int(needed))
            recomputed_s[name] = recomputed_s.get(name, 0.0) + graph.operations[op].cost_s
    return PlannedStays(tuple(stays), recomputed_s)


def _departures(graph: Graph, cut: OffloadCut, budget_bytes: int) -> dict[int, int]:
    """Return, for each offloaded value, the operation before which it has to be gone: the cut, or
    an earlier one that does not fit the budget otherwise. Values leave in the order in which they
    are produced; others are freed after their last reader before the cut, unless they are live at
    the cut."""
    size = [value.size_bytes for value in graph.values]
    staying = graph.results | cut.retained
    last_reader = {
        v: max((op for op in graph.consumers[v] if op < cut.operation), default=graph.producer[v])
        for v in range(len(graph.values))
        if graph.producer[v] < cut.operation
    }
    freed: list[list[int]] = [[] for _ in range(cut.operation)]
    for v, op in last_reader.items():
        if v not in staying and v not in cut.offloaded:
            freed[op].append(v)
    gone_by = dict.fromkeys(cut.offloaded, cut.operation)
    queue = deque(sorted(cut.offloaded, key=lambda v: graph.producer[v]))
    live_bytes = graph.constant_bytes
    for op in range(cut.operation):
        needed_bytes = live_bytes + graph.min_produced_bytes[op]
        while needed_bytes > budget_bytes and queue and last_reader[queue[0]] < op:
            value = queue.popleft()
            gone_by[value] = op
            needed_bytes -= size[value]
            live_bytes -= size[value]
        live_bytes += sum(size[v] for v in graph.operations[op].outputs)
        live_bytes -= sum(size[v] for v in freed[op])
    return gone_by


def _needs(graph: Graph, cut: OffloadCut) -> dict[int, float]:
    """Return, for each recomputed operation, the first operation that it is recomputed for."""
    needed_by: dict[int, float] = {}
    available = cut.offloaded | cut.retained
    for op in sorted(cut.recomputed, reverse=True):
        needed_by[op] = min(
            (
                _need_of_value(graph, cut, value, needed_by)
                for value in graph.operations[op].outputs
                if value not in available
            ),
            default=math.inf,
        )
    return needed_by


def _need_of_value(graph: Graph, cut: OffloadCut, value: int, needed_by: dict[int, float]) -> float:
    """Return the first operation from the cut on that needs a value, directly or for a
    recomputation."""
    direct = (op for op in graph.consumers[value] if op >= cut.operation)
    indirect = (needed_by[op] for op in graph.consumers[value] if op in needed_by)
    return min(min(direct, default=math.inf), min(indirect, default=math.inf))


def node_name(graph: Graph, op: int) -> str:
    """Return the name of an operation, of the next one for the boundary: a trace has no node for
    it."""
    return graph.operations[op + (op == graph.boundary)].name
