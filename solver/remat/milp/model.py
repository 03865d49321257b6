"""The mixed-integer program: what to retain and what to recompute over a slot sequence.

Equivalent to Checkmate's program (Jain et al., MLSys 2020, eq. 1 to 9) on the complete slots, with
one binary per optional slot instead of a matrix: no FREE variables, because a value can only
usefully be freed right after an event of it. An *event* of value d is a slot whose operation
consumes or produces d.

Variables
    r_s in {0, 1}     slot s runs (1 for mandatory slots, so no variable)
    h_{d,e} in {0, 1} d is retained from its event e to its next event; integral once r is, but
                      declared so: solvers derive cover cuts from the memory rows then, and branch
                      on it
    u_s >= 0          bytes retained just before slot s, constant memory excluded (substituted
                      where it is a short sum)
    b >= 0            the budget, only where the peak itself is minimised

Minimise the sum of cost_{op(s)} r_s (`remat.milp.builder`) subject to
    consume   r_s <= h_{d,e-1},  h_{d,e} <= h_{d,e-1}             d an input of s
    produce   h_{d,e} <= h_{d,e-1} + r_s,  r_s + h_{d,e-1} <= 1   d an output of s
    balance   u_{s+1} = u_s + sum_d size_d (h_{d,e} - h_{d,e-1})  d touched at s
    peak      u_s + r_s (output bytes + workspace of op(s)) <= b - constant memory
    group     at most one slot of a group runs, on inputs that are live

where `ProgramBuilder._write_consume` and so on write the rows of these names, and
`remat.milp.model` those of groups.

The second produce row costs nothing, even where an operation has several outputs: the recomputed
value serves every later reader, so the old copy need not live up to that run.

Results are retained from their first production on: constants, no variables. So are values of size
0. After its last consumer a value is not retained, which needs no variable either.

Numerics. Sizes are divided by a power of two, so no size is rounded and the budget is kept exactly;
rows are in units of about a thousandth of the budget. Costs are scaled to a total of 1000. The
caller verifies every solution with the simulator, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pulp

from remat.graph import Graph
from remat.milp.builder import BinaryTerm, ProgramBuilder
from remat.milp.shared_decisions import SharedDecisions
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.program_arrays import ProgramArrays


def add_group_cuts(builder: ProgramBuilder) -> None:
    """Add the rows that tighten the relaxation for every group of more than one slot.

    Take an operation v and a group G of its slots of which at most one runs. Whichever slot runs,
    each input d of v must be live: retained since before the group began, or produced again in
    between. So for every input d, produced by p, and every t in G

        sum_{s in G, s <= t} r_s
            <=  h_{d, before first(G)} + sum_{slots q of p, first(G) < q < t} r_q

    Otherwise the relaxation runs a quarter of v in each of four slots and retains only a quarter of
    d: on a 12-layer GPT at half its memory the LP bound is 2.65% of extra time without these rows
    and 5.69% with them, the optimum being 6.17%.
    """
    builder.enable_all_rows()
    slots_of: dict[int, list[int]] = {}
    for slot in builder.run_variables:
        slots_of.setdefault(builder.slots.operations[slot], []).append(slot)
    for number, group in enumerate(builder.slots.groups):
        if len(group) < 2 or not all(builder.has_rows(slot) for slot in group):
            continue
        runs = [builder.run_variables[slot] for slot in group]
        builder.add_le(f"group_{number}", runs, [], 1)
        operation = builder.graph.operations[builder.slots.operations[group[0]]]
        for value in operation.inputs:
            if builder.has_no_variable(value):
                continue
            producer_slots = slots_of.get(builder.graph.producer[value], [])
            retained = builder.retained_before[group[0], value]
            renewed = builder.first_slot.get(builder.graph.renewal.get(value, -1), -1)
            for count, last_slot in enumerate(group[1:], start=2):
                if group[0] < renewed < last_slot:
                    break  # from there on, the value is live without a recomputation
                producer_runs = [
                    builder.run_variables[q] for q in producer_slots if group[0] < q < last_slot
                ]
                builder.add_le(
                    f"cut_{number}_{value}_{last_slot}", runs[:count], [retained, *producer_runs]
                )


@dataclass
class MilpModel:
    """A program built by `build`, with what is needed to read its solution.

    `run_variables` are by optional slot. `retained` is by slot and value that it reads or produces,
    from then on; it has no entry for values that are always retained.
    """

    problem: pulp.LpProblem
    slots: Slots
    run_variables: dict[int, pulp.LpVariable]
    retained: dict[tuple[int, int], BinaryTerm]
    unit_bytes: int
    cost_unit_s: float
    rows: int
    columns: int

    @cached_property
    def arrays(self) -> ProgramArrays:
        """The program as arrays."""
        return pulp_versions.read_arrays(self.problem)


def build(
    graph: Graph, slots: Slots, budget_bytes: int | None, shared: SharedDecisions | None = None
) -> MilpModel:
    """Build the program over `slots`: least cost within `budget_bytes`, or least peak if that is
    None.

    With `shared`, slots of one class run together or not at all: a small program, whose bound does
    not hold for other schedules.

    The objective is in units of `cost_unit_s` seconds and includes the mandatory runs, or in units
    of `unit_bytes` bytes and excludes constant memory.
    """
    builder = ProgramBuilder(graph, slots, budget_bytes, shared)
    builder.write_rows()
    add_group_cuts(builder)
    builder.finish()
    return MilpModel(
        problem=builder.problem,
        slots=slots,
        run_variables=builder.run_variables,
        retained=builder.retained_after,
        unit_bytes=builder.unit_bytes,
        cost_unit_s=builder.cost_unit_s,
        rows=len(builder.rows),
        columns=builder.columns,
    )
