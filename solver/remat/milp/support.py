"""What the linear relaxation of the program over slots runs again, even if by a little, and holds.

Of two thousand slots it uses a few hundred. A program over these alone solves in seconds and finds
what the whole program finds in a minute, if at all. Equivalent to fixing at zero the binaries that
are zero in the relaxation, as in RENS (Berthold, 2014), but before the program is built, and with
the others free. What it holds is advice for eviction: where little room is left, far better than
that of a few moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from remat.errors import SolverError
from remat.graph import Graph
from remat.milp import model
from remat.milp.model import Model
from remat.milp.slots import Slots
from remat.milp.solvers.highs import BulkHiGHS
from remat.schedule import Schedule

_NOT_AT_ALL = 1e-4
_STAGES = 500
"""Of how many operations at most the shares are told."""

Shares = dict[int, float]
"""Of values, how much of them is held; those not named not at all."""


class Support(NamedTuple):
    """Of a solved relaxation: the slots that it uses, as a schedule, which need not fit the budget;
    and what it holds before operations, in their order."""

    used: Schedule
    held: list[tuple[int, Shares]]


def support(
    graph: Graph,
    slots: Slots,
    budget_bytes: int,
    *,
    time_limit: float,
    cancelled: Callable[[], bool] | None = None,
) -> Support | None:
    """What the relaxation over the slots uses and holds. None if no relaxed schedule fits, or the
    time was too short."""
    program = model.build(graph, slots, budget_bytes)
    highs = BulkHiGHS(gap=0.0, time_limit=time_limit, threads=1, cancelled=cancelled)
    try:
        answer = highs.solve(program.arrays.relaxed())
    except SolverError:
        return None
    if answer.bound is None:
        return None
    used = slots.schedule(
        slot for slot, run in program.runs.items() if (run.varValue or 0.0) > _NOT_AT_ALL
    )
    every = 1 + len(graph) // _STAGES
    held = [(op, dict(now)) for op, now in held_shares(graph, program) if op % every == 0]
    return Support(used, held)


def held_shares(graph: Graph, relaxed: Model) -> Iterator[tuple[int, Shares]]:
    """For each operation in order, what a solved relaxation holds before it; what is no question is
    left out."""
    now: Shares = {}
    for slot, op in enumerate(relaxed.slots.operations):
        if not relaxed.slots.optional[slot]:
            yield op, now
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            held = relaxed.held.get((slot, v), 0)
            share = held if isinstance(held, int) else held.varValue or 0.0
            if share > _NOT_AT_ALL:
                now[v] = share
            else:
                now.pop(v, None)
