"""The mixed-integer program: what to hold and what to run again over a slot sequence.

Equivalent to Checkmate's program (Jain et al., MLSys 2020, eq. 1 to 9) on the complete slots, with
one binary per optional slot instead of a matrix: no FREE variables, because a value can only
usefully be freed right after an event of it. An *event* of value d is a slot whose operation
consumes or produces d.

Variables
    r_s in {0, 1}     slot s runs (1 for mandatory slots, so no variable)
    h_{d,e} in {0, 1} d is held from its event e to its next event; integral once r is, but declared
                      so: solvers derive cover cuts from the memory rows then, and branch on it
    u_s >= 0          bytes held just before slot s, constant memory excluded (substituted
                      where it is a short sum)
    b >= 0            the budget, only where the peak itself is minimised

Minimise the sum of cost_{op(s)} r_s (`remat.milp.builder`) subject to
    consume   r_s <= h_{d,e-1},  h_{d,e} <= h_{d,e-1}               d an input of s    (`_consume`)
    produce   h_{d,e} <= h_{d,e-1} + r_s,  r_s + h_{d,e-1} <= 1     d an output of s   (`_produce`)
    balance   u_{s+1} = u_s + sum_d size_d (h_{d,e} - h_{d,e-1})    d touched at s     (`_balance`)
    peak      u_s + r_s (output bytes + workspace of op(s)) <= b - constant memory     (`_peak`)
    group     at most one slot of a group runs, on inputs that are there       (`remat.milp.cuts`)

The second produce row costs nothing, even where an operation has several outputs: the value made
again serves every later reader, so the old copy need not live up to that run.

Results are held from their first production on: constants, no variables. So are values of size 0.
After its last consumer a value is not held, which is no variable either.

Numbers. Sizes are divided by a power of two, so no size is rounded and the budget is kept exactly;
rows read in units of about a thousandth of the budget. Costs are scaled to a total of 1000. The
caller verifies every solution with the simulator, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pulp

from remat.graph import Graph
from remat.milp.builder import Builder, Held
from remat.milp.cuts import add_group_cuts
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.pulp_versions import Arrays
from remat.milp.ties import Ties


@dataclass
class Model:
    """A program built by `build`, with what is needed to read its solution.

    `runs` by optional slot; `held` by slot and value that it reads or makes, from then on, with no
    entry for what is always held.
    """

    problem: pulp.LpProblem
    slots: Slots
    runs: dict[int, pulp.LpVariable]
    held: dict[tuple[int, int], Held]
    unit_bytes: int
    cost_unit_s: float
    rows: int
    columns: int

    @cached_property
    def arrays(self) -> Arrays:
        """What was built, as arrays."""
        return pulp_versions.read(self.problem)


def build(graph: Graph, slots: Slots, budget_bytes: int | None, ties: Ties | None = None) -> Model:
    """The program over `slots`: least cost within `budget_bytes`, or least peak if that is None.

    With `ties`, slots of one class run together, or not at all: a small program, whose bound says
    nothing about others.

    The objective is in units of `cost_unit_s` seconds and includes the mandatory runs, or in
    units of `unit_bytes` bytes and excludes constant memory.
    """
    builder = Builder(graph, slots, budget_bytes, ties)
    builder.walk()
    add_group_cuts(builder)
    builder.finish()
    return Model(
        problem=builder.problem,
        slots=slots,
        runs=builder.runs,
        held=builder.after,
        unit_bytes=builder.unit_bytes,
        cost_unit_s=builder.cost_unit_s,
        rows=len(builder.rows),
        columns=builder.columns,
    )
