"""From a solution of the relaxation to stays on the host, by the names of a trace's tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from remat.documents.trace import Trace
from remat.graph import Graph
from remat.milp.offload_relaxation import OffloadCut
from remat.passes.offload.candidates import Candidate
from remat.passes.offload.rewriting import HostStay


class PlannedStays(NamedTuple):
    """Stays on the host, and the seconds of recomputation that are expected before operations."""

    stays: tuple[HostStay, ...]
    recomputed_s: dict[str, float]


def values_of_candidates(
    graph: Graph, candidates: tuple[Candidate, ...], min_bytes: int
) -> dict[int, Candidate]:
    """Return the candidates of at least `min_bytes` by their values in the trace's graph."""
    by_name = {c.tensor: c for c in candidates if c.size_bytes >= min_bytes}
    return {v: by_name[value.name] for v, value in enumerate(graph.values) if value.name in by_name}


def stays_of_cut(trace: Trace, cut: OffloadCut, values: dict[int, Candidate]) -> PlannedStays:
    """Return the stays of the values that the cut's solution offloads.

    A tensor is back before the first operation that reads it, or for which an operation that reads
    it is recomputed.
    """
    graph = trace.graph()
    needed_by = _needs(graph, cut)
    during = _node_name(graph, cut.operation)
    stays: list[HostStay] = []
    for value in sorted(cut.offloaded):
        needed = _need_of_value(graph, cut, value, needed_by)
        name = "" if needed == math.inf else _node_name(graph, int(needed))
        stays.append(HostStay(values[value].tensor, during, name))
    recomputed_s: dict[str, float] = {}
    for op, needed in needed_by.items():
        if needed < math.inf:
            name = _node_name(graph, int(needed))
            recomputed_s[name] = recomputed_s.get(name, 0.0) + graph.operations[op].cost_s
    return PlannedStays(tuple(stays), recomputed_s)


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


def _node_name(graph: Graph, op: int) -> str:
    """Return the name of an operation, of the next one for the boundary: a trace has no node for
    it."""
    return graph.operations[op + (op == graph.boundary)].name
