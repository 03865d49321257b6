"""From the relaxed program's fractions to a schedule: both phases of Checkmate's rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remat.graph import Graph
from remat.milp.model import MilpModel
from remat.schedule import Schedule, missing_operations

Shares = npt.NDArray[np.float64]
"""[stage, value]: how much of a value is held when the stage of an operation begins."""


def retained_share_matrix(graph: Graph, relaxed: MilpModel) -> Shares:
    """S of a solved relaxation over complete slots; what is no question there is 1."""
    now = np.zeros(len(graph.values))
    shares = np.zeros((len(graph) + 1, len(graph.values)))
    stage = 0
    for slot, op in enumerate(relaxed.slots.operations):
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            if v in graph.results or graph.values[v].size_bytes == 0:
                now[v] = 1.0
            else:
                held = relaxed.retained[slot, v]
                now[v] = held if isinstance(held, int) else held.varValue or 0.0
        if not relaxed.slots.is_optional[slot]:
            stage += 1
            shares[stage] = now
    return shares


def rounded(graph: Graph, is_held: npt.NDArray[np.bool_]) -> Schedule:
    """The schedule that holds S = `is_held` between stages and runs as little as that takes.

    Before each operation run what it misses, and what the next stage wants held. What cannot be
    made again is held for as long as anyone reads it.
    """
    runs: list[int] = []
    stays = [
        v in graph.results or not graph.operations[op].recomputable
        for v, op in enumerate(graph.producer)
    ]
    retained: set[int] = set()
    for op in range(len(graph)):
        after = {int(v) for v in np.flatnonzero(is_held[op + 1])}
        after |= {v for v in range(len(graph.values)) if stays[v]}
        before = {v for v in after if graph.producer[v] < op}
        wanted = (*graph.operations[op].inputs, *before)
        runs += [*missing_operations(graph, wanted, retained), op]
        retained = {v for v in after if graph.producer[v] <= op}
    return Schedule.of(runs)
