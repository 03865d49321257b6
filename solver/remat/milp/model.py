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

Minimise the sum of cost_{op(s)} r_s (`remat.milp.model`) subject to
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

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import pulp

from remat.graph import Graph
from remat.milp.identical_blocks import SharedDecisions
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.program_arrays import ProgramArrays
from remat.milp.solvers.pulp_solvers import expression


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
        return pulp_solvers.read_arrays(self.problem)


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


COST_SCALE = 1000.0
"""The total cost of one step without recomputation, in units of the objective."""

MAX_SUM_TERMS = 40
"""Number of terms up to which the retained bytes are written as a sum; longer sums get a variable.
"""

BinaryTerm = pulp.LpVariable | int
"""A binary variable, or 0 or 1 where its value is fixed: that a slot runs, or that a value is
retained."""


class ProgramBuilder:
    """Walks the slot sequence once and writes the rows; its state is what is retained at the
    current slot."""

    def __init__(
        self, graph: Graph, slots: Slots, budget_bytes: int | None, shared: SharedDecisions | None
    ) -> None:
        self.graph = graph
        self.slots = slots
        self.shared = shared
        self._shared_variables: dict[Hashable, pulp.LpVariable] = {}
        self._writes_rows = True
        """True if rows are written for the current slot."""
        scale_bytes = budget_bytes if budget_bytes is not None else _total_bytes(graph)
        self.unit_bytes = 1 << max(0, scale_bytes.bit_length() - 11)
        self.cost_unit_s = graph.total_cost_s / COST_SCALE or 1.0
        self.sizes = [value.size_bytes / self.unit_bytes for value in graph.values]
        self.columns = 0
        self.problem = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        self.rows: list[tuple[str, dict[pulp.LpVariable, float], int, float]] = []
        self.run_variables: dict[int, pulp.LpVariable] = {
            slot: self._run_variable(slot)
            for slot, optional in enumerate(slots.is_optional)
            if optional
        }
        self.available: float | pulp.LpVariable = (
            self._variable("b", None)
            if budget_bytes is None
            else (budget_bytes - graph.constant_bytes) / self.unit_bytes
        )
        self.retained_before: dict[tuple[int, int], BinaryTerm] = {}
        """By slot and value that it reads: whether the value is retained before the slot."""
        self.retained_after: dict[tuple[int, int], BinaryTerm] = {}
        """By slot and value that it reads or produces: whether the value is retained after the
        slot."""
        self.last_reader = [-1] * len(graph.values)
        for slot, op in enumerate(slots.operations):
            for v in graph.operations[op].inputs:
                self.last_reader[v] = slot
        self.first_slot = {op: slot for slot, op in reversed([*enumerate(slots.operations)])}
        """The slot of the first run of each operation: a recomputation overwrites nothing, since
        whether it runs is a variable, too."""
        self._retained: list[BinaryTerm] = [0] * len(graph.values)
        self._live: dict[pulp.LpVariable, float] = {}
        self._live_constant = 0.0

    def has_no_variable(self, value: int) -> bool:
        """True if no decision on retaining the value is needed: results, and values without
        bytes."""
        return value in self.graph.results or self.sizes[value] == 0

    def write_rows(self) -> None:
        """Write the rows of every slot, in order."""
        for slot, op in enumerate(self.slots.operations):
            run = self.run_variables.get(slot, 1)
            operation = self.graph.operations[op]
            overwrites = operation.overwrites if slot == self.first_slot[op] else ()
            self._writes_rows = self.has_rows(slot)
            if not overwrites:
                self._write_peak(slot, run, op, ())
            change: dict[pulp.LpVariable, float] = {}
            constant = 0.0
            for value in operation.inputs:
                if not self.has_no_variable(value):
                    old, new = self._write_consume(slot, run, value)
                    constant += self._add_change(change, value, old, new)
            if overwrites:  # whether an overwritten value is retained is decided now
                self._write_peak(slot, run, op, overwrites)
            for value in operation.outputs:
                if not self.has_no_variable(value):
                    old, new = self._write_produce(slot, run, value)
                    constant += self._add_change(change, value, old, new)
                elif isinstance(run, int):
                    constant += self.sizes[value]
            self._write_balance(slot, change, constant)

    def add(self, name: str, terms: dict[pulp.LpVariable, float], sense: int, rhs: float) -> None:
        """Add the row: sum of terms (sense) rhs."""
        if self._writes_rows:
            self.rows.append((name, terms, sense, rhs))

    def add_le(
        self, name: str, left: Iterable[BinaryTerm], right: Iterable[BinaryTerm], rhs: int = 0
    ) -> None:
        """Add the row: sum(left) <= sum(right) + rhs. Fixed terms are moved to the right-hand
        side."""
        terms: dict[pulp.LpVariable, float] = {}
        for sign, side in ((1, left), (-1, right)):
            for term in side:
                if isinstance(term, int):
                    rhs -= sign * term
                else:
                    terms[term] = terms.get(term, 0) + sign
        if terms:
            self.add(name, terms, pulp.LpConstraintLE, rhs)

    def enable_all_rows(self) -> None:
        """Write all rows from now on, whatever slot the walk ended at."""
        self._writes_rows = True

    def has_rows(self, slot: int) -> bool:
        """True unless another slot that shares this slot's decisions has the same rows."""
        return self.shared is None or self.shared.has_rows[slot]

    def finish(self) -> None:
        """Set the objective and add the rows to the problem."""
        self._set_objective()
        pulp_solvers.add_rows(self.problem, self.rows)

    def _write_consume(
        self, slot: int, run: BinaryTerm, value: int
    ) -> tuple[BinaryTerm, BinaryTerm]:
        old = self._retained[value]
        self.retained_before[slot, value] = old
        if isinstance(run, int):
            if not isinstance(old, int):
                old.lowBound = 1
        else:
            self.add_le(f"consume_{slot}_{value}", [run], [old])
        if slot >= self.last_reader[value]:
            return old, self._set_retained(slot, value, 0)
        new = self._retention_variable(slot, value)
        if not isinstance(old, int):
            self.add_le(f"keep_{slot}_{value}", [new], [old])
        return old, self._set_retained(slot, value, new)

    def _write_produce(
        self, slot: int, run: BinaryTerm, value: int
    ) -> tuple[BinaryTerm, BinaryTerm]:
        old = self._retained[value]
        if slot >= self.last_reader[value]:
            return old, self._set_retained(slot, value, 0)
        new = self._retention_variable(slot, value)
        if not isinstance(run, int):
            self.add_le(f"produce_{slot}_{value}", [new], [old, run])
            self.add_le(f"once_{slot}_{value}", [run, old], [], 1)
        return old, self._set_retained(slot, value, new)

    def _write_peak(self, slot: int, run: BinaryTerm, op: int, overwrites: tuple[int, ...]) -> None:
        operation = self.graph.operations[op]
        need = (
            sum(self.sizes[v] for v in operation.outputs)
            + operation.workspace_bytes / self.unit_bytes
        )
        terms = dict(self._live)
        rhs = -self._live_constant
        # An overwritten value takes no memory in addition to the outputs unless it is retained.
        for value in overwrites:
            need -= self.sizes[value]
            term = self._retained[value]
            if isinstance(term, int):
                rhs -= term * self.sizes[value]
            else:
                terms[term] = terms.get(term, 0.0) + self.sizes[value]
        if isinstance(run, int):
            rhs -= need
        elif need:
            terms[run] = need
        if isinstance(self.available, pulp.LpVariable):
            terms[self.available] = -1
        else:
            rhs += self.available
        # A row without variables is either void or false. A false one must stay in the program, and
        # solvers accept no empty rows.
        if terms:
            self.add(f"peak_{slot}", terms, pulp.LpConstraintLE, rhs)
        elif rhs < 0:
            self.add(
                f"peak_{slot}", {self._variable(f"none{slot:06d}", 0): 1}, pulp.LpConstraintLE, rhs
            )

    def _write_balance(
        self, slot: int, change: dict[pulp.LpVariable, float], constant: float
    ) -> None:
        """Write the row for the retained bytes before the next slot: a sum or, where that grows
        long, a variable.

        A variable at every slot makes a chain of equalities on which HiGHS's separation of cuts is
        very slow (5 s a round on ResNet-50); none at all makes the rows long. Measured best: 40
        terms.
        """
        self._live_constant += constant
        if not change:
            return
        terms = dict(self._live)
        for term, size in change.items():
            terms[term] = terms.get(term, 0.0) + size
            if terms[term] == 0.0:
                del terms[term]
        if len(terms) <= MAX_SUM_TERMS or not self._writes_rows:
            self._live = terms
            return
        live = self._variable(f"u{slot + 1:06d}", None)
        terms[live] = -1.0
        self.add(f"balance_{slot}", terms, pulp.LpConstraintEQ, -self._live_constant)
        self._live, self._live_constant = {live: 1.0}, 0.0

    def _add_change(
        self, change: dict[pulp.LpVariable, float], value: int, old: BinaryTerm, new: BinaryTerm
    ) -> float:
        constant = 0.0
        for sign, term in ((1.0, new), (-1.0, old)):
            if isinstance(term, int):
                constant += sign * term * self.sizes[value]
            else:
                change[term] = change.get(term, 0.0) + sign * self.sizes[value]
        return constant

    def _set_retained(self, slot: int, value: int, term: BinaryTerm) -> BinaryTerm:
        self._retained[value] = self.retained_after[slot, value] = term
        return term

    def _set_objective(self) -> None:
        if isinstance(self.available, pulp.LpVariable):
            self.problem.setObjective(expression({self.available: 1.0}))
            return
        unit = self.cost_unit_s
        costs: dict[pulp.LpVariable, float] = {}
        for slot, run in self.run_variables.items():
            cost_s = self.graph.operations[self.slots.operations[slot]].cost_s
            costs[run] = costs.get(run, 0.0) + cost_s / unit
        total = self.graph.total_cost_s / unit
        self.problem.setObjective(expression(costs, total))

    def _run_variable(self, slot: int) -> pulp.LpVariable:
        key = None if self.shared is None else self.shared.run_key(slot)
        return self._shared_variable(key, f"r{slot:06d}", pulp.LpInteger)

    def _retention_variable(self, slot: int, value: int) -> pulp.LpVariable:
        key = None if self.shared is None else self.shared.retention_key(slot, value)
        # Sums over many blocks give no cover cuts; the variable is integral without being declared
        # so.
        return self._shared_variable(key, f"h{value:06d}_{slot:06d}", pulp.LpContinuous)

    def _shared_variable(self, key: Hashable, name: str, kind: str) -> pulp.LpVariable:
        """Return the variable of this key; a new one for a new key, or for none."""
        if key is None:
            return self._variable(name, 1, pulp.LpInteger)
        if key not in self._shared_variables:
            self._shared_variables[key] = self._variable(name, 1, kind)
        return self._shared_variables[key]

    def _variable(self, name: str, upper: float | None, cat: str = "Continuous") -> pulp.LpVariable:
        self.columns += 1
        return self.problem.add_variable(name, 0, upper, cat)


def _total_bytes(graph: Graph) -> int:
    return graph.constant_bytes + sum(value.size_bytes for value in graph.values) or 1
