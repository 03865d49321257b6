"""`ProgramBuilder`: writes the rows of the program (`remat.milp.model`) in one walk over the slot
sequence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pulp

from remat.graph import Graph
from remat.milp.shared_decisions import SharedDecisions
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.pulp_versions import expression

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
        pulp_versions.add_rows(self.problem, self.rows)

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
