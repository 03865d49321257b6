"""What the linear relaxation of the program over slots runs again, even if by a little.

Of two thousand slots it uses a few hundred. A program over these alone solves in seconds and finds
what the whole program finds in a minute, if at all. Equivalent to fixing at zero the binaries that
are zero in the relaxation, as in RENS (Berthold, 2014), but before the program is built, and with
the others free.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.errors import SolverError
from remat.graph import Graph
from remat.milp import model
from remat.milp.slots import Slots
from remat.milp.solvers.highs import BulkHiGHS
from remat.schedule import Schedule

_NOT_AT_ALL = 1e-4


def support(
    graph: Graph,
    slots: Slots,
    budget_bytes: int,
    *,
    time_limit: float,
    cancelled: Callable[[], bool] | None = None,
) -> Schedule | None:
    """The slots that the relaxation uses, as a schedule: a hint for `slots.recombined`, which need
    not fit the budget. None if no relaxed schedule fits, or the time was too short."""
    program = model.build(graph, slots, budget_bytes)
    highs = BulkHiGHS(gap=0.0, time_limit=time_limit, threads=1, cancelled=cancelled)
    try:
        answer = highs.solve(program.arrays.relaxed())
    except SolverError:
        return None
    if answer.bound is None:
        return None
    return slots.schedule(
        slot for slot, run in program.runs.items() if (run.varValue or 0.0) > _NOT_AT_ALL
    )
