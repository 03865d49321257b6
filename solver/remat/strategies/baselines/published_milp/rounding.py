"""From the fractions of the relaxed program to a schedule: both phases of Checkmate's rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from remat.graph import Graph
from remat.milp.model import MilpModel
from remat.schedule import Schedule, missing_operations

Shares = npt.NDArray[np.float64]
"""Array [stage, value]: the share of a value that is retained when the stage of an operation
begins."""


def retained_share_matrix(graph: Graph, relaxed: MilpModel) -> Shares:
    """Return S of a solved relaxation over complete slots; values without a variable have 1."""
    current = np.zeros(len(graph.values))
    shares = np.zeros((len(graph) + 1, len(graph.values)))
    stage = 0
    for slot, op in enumerate(relaxed.slots.operations):
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            if v in graph.results or graph.values[v].size_bytes == 0:
                current[v] = 1.0
            else:
                retained = relaxed.retained[slot, v]
                current[v] = retained if isinstance(retained, int) else retained.varValue or 0.0
        if not relaxed.slots.is_optional[slot]:
            stage += 1
            shares[stage] = current
    return shares


def round_schedule(graph: Graph, is_retained: npt.NDArray[np.bool_]) -> Schedule:
    """Return the schedule that retains S = `is_retained` between stages and recomputes as little as
    that takes.

    Before each operation run what it misses, and what the next stage wants retained. Values that
    cannot be recomputed are retained for as long as anything reads them.
    """
    runs: list[int] = []
    is_permanent = [
        v in graph.results or not graph.operations[op].recomputable
        for v, op in enumerate(graph.producer)
    ]
    retained: set[int] = set()
    for op in range(len(graph)):
        after = {int(v) for v in np.flatnonzero(is_retained[op + 1])}
        after |= {v for v in range(len(graph.values)) if is_permanent[v]}
        before = {v for v in after if graph.producer[v] < op}
        required = (*graph.operations[op].inputs, *before)
        runs += [*missing_operations(graph, required, retained), op]
        retained = {v for v in after if graph.producer[v] <= op}
    return Schedule.of(runs)
