"""The support of the relaxation over slots: the slots that it uses, and what it retains.

Of two thousand slots it uses a few hundred. A program over these alone solves in seconds and finds
what the program over all slots finds in a minute, if at all. Equivalent to fixing at zero the
binaries that are zero in the relaxation, as in RENS (Berthold, 2014), but before the program is
built, and with the others free. What it retains is advice for eviction: where little memory is
left, far better than that of a few checkpoint cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from remat.errors import SolverError
from remat.graph import Graph
from remat.milp import model
from remat.milp.model import MilpModel
from remat.milp.slots import Slots
from remat.milp.solvers.highs import HighsSolver
from remat.schedule import Schedule

_MIN_SHARE = 1e-4
"""Smaller values of the relaxation's variables count as zero."""
_MAX_ADVISED_OPERATIONS = 500

Shares = dict[int, float]
"""By value, the share of it that is retained (0 to 1); values that are left out are not."""


class RelaxationSupport(NamedTuple):
    """The schedule of all slots that a solved relaxation uses, which need not fit the budget, and
    the shares of values that it retains before operations, in their order."""

    schedule: Schedule
    retained_shares: list[tuple[int, Shares]]


def relaxation_support(
    graph: Graph,
    slots: Slots,
    budget_bytes: int,
    *,
    time_limit: float,
    is_cancelled: Callable[[], bool] | None = None,
) -> RelaxationSupport | None:
    """Solve the relaxation over the slots and return its support.

    Returns None if no relaxed schedule fits, or the time was too short.
    """
    program = model.build(graph, slots, budget_bytes)
    highs = HighsSolver(gap=0.0, time_limit=time_limit, threads=1, is_cancelled=is_cancelled)
    try:
        answer = highs.solve(program.arrays.relaxed())
    except SolverError:
        return None
    if answer.bound is None:
        return None
    schedule = slots.schedule(
        slot for slot, run in program.run_variables.items() if (run.varValue or 0.0) > _MIN_SHARE
    )
    stride = 1 + len(graph) // _MAX_ADVISED_OPERATIONS
    shares = [(op, dict(s)) for op, s in retained_shares(graph, program) if op % stride == 0]
    return RelaxationSupport(schedule, shares)


def retained_shares(graph: Graph, relaxed: MilpModel) -> Iterator[tuple[int, Shares]]:
    """Yield each operation, in order, with the shares that a solved relaxation retains before it.

    Values without a variable (results, and values without bytes) are left out.
    """
    shares: Shares = {}
    for slot, op in enumerate(relaxed.slots.operations):
        if not relaxed.slots.is_optional[slot]:
            yield op, shares
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            retained = relaxed.retained.get((slot, v), 0)
            share = retained if isinstance(retained, int) else retained.varValue or 0.0
            if share > _MIN_SHARE:
                shares[v] = share
            else:
                shares.pop(v, None)
