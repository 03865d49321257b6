"""The rows of the program (`remat.milp.model`), written in one walk over the slot sequence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pulp

from remat.graph import Graph
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.pulp_versions import expression
from remat.milp.ties import Ties

COST_SCALE = 1000.0
"""The total cost of one step without recomputation, in units of the objective."""

SHORT_SUM = 40
"""Bytes held are written out up to this many terms, and named by a variable beyond."""

Held = pulp.LpVariable | int
"""Whether a value is held: a variable, or 0 or 1 where it is known."""


class Builder:
    """Walks the slot sequence once and writes the rows; the state is what is held now."""

    def __init__(
        self, graph: Graph, slots: Slots, budget_bytes: int | None, ties: Ties | None
    ) -> None:
        self.graph = graph
        self.slots = slots
        self.ties = ties
        self._tied: dict[Hashable, pulp.LpVariable] = {}
        self._writes = True
        """Whether rows are written for the slot at hand."""
        scale_bytes = budget_bytes if budget_bytes is not None else _keep_all_bytes(graph)
        self.unit_bytes = 1 << max(0, scale_bytes.bit_length() - 11)
        self.cost_unit_s = graph.total_cost_s / COST_SCALE or 1.0
        self.sizes = [value.size_bytes / self.unit_bytes for value in graph.values]
        self.columns = 0
        self.problem = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        self.rows: list[tuple[str, dict[pulp.LpVariable, float], int, float]] = []
        self.runs: dict[int, pulp.LpVariable] = {
            slot: self._run(slot) for slot, optional in enumerate(slots.optional) if optional
        }
        self.room: float | pulp.LpVariable = (
            self._variable("b", None)
            if budget_bytes is None
            else (budget_bytes - graph.constant_bytes) / self.unit_bytes
        )
        self.before: dict[tuple[int, int], Held] = {}
        """By slot and value that it reads: whether the value is held then."""
        self.after: dict[tuple[int, int], Held] = {}
        """By slot and value that it reads or makes: whether the value is held from then on."""
        self.last_reader = [-1] * len(graph.values)
        for slot, op in enumerate(slots.operations):
            for v in graph.operations[op].inputs:
                self.last_reader[v] = slot
        self._held: list[Held] = [0] * len(graph.values)
        self._live: dict[pulp.LpVariable, float] = {}
        self._live_constant = 0.0

    def is_free(self, value: int) -> bool:
        """Whether holding the value is no question: results and values without bytes."""
        return value in self.graph.results or self.sizes[value] == 0

    def walk(self) -> None:
        """Write the rows of every slot, in order."""
        for slot, op in enumerate(self.slots.operations):
            run = self.runs.get(slot, 1)
            operation = self.graph.operations[op]
            self._writes = self.is_written(slot)
            if not operation.overwrites:
                self._peak(slot, run, op)
            change: dict[pulp.LpVariable, float] = {}
            constant = 0.0
            for value in operation.inputs:
                if not self.is_free(value):
                    old, new = self._consume(slot, run, value)
                    constant += self._change(change, value, old, new)
            if operation.overwrites:  # known now: what of it is held on
                self._peak(slot, run, op)
            for value in operation.outputs:
                if not self.is_free(value):
                    old, new = self._produce(slot, run, value)
                    constant += self._change(change, value, old, new)
                elif isinstance(run, int):
                    constant += self.sizes[value]
            self._balance(slot, change, constant)

    def add(self, name: str, terms: dict[pulp.LpVariable, float], sense: int, rhs: float) -> None:
        """One row: terms (sense) rhs."""
        if self._writes:
            self.rows.append((name, terms, sense, rhs))

    def add_le(self, name: str, left: Iterable[Held], right: Iterable[Held], rhs: int = 0) -> None:
        """One row: sum(left) <= sum(right) + rhs, where known terms are folded in."""
        terms: dict[pulp.LpVariable, float] = {}
        for sign, side in ((1, left), (-1, right)):
            for held in side:
                if isinstance(held, int):
                    rhs -= sign * held
                else:
                    terms[held] = terms.get(held, 0) + sign
        if terms:
            self.add(name, terms, pulp.LpConstraintLE, rhs)

    def write_all(self) -> None:
        """Write rows again, whatever slot was at hand."""
        self._writes = True

    def is_written(self, slot: int) -> bool:
        """Whether the rows of this slot are none of those of a slot that it is tied to."""
        return self.ties is None or self.ties.written[slot]

    def finish(self) -> None:
        """Set the objective, and give the rows to the problem."""
        self._set_objective()
        pulp_versions.add_rows(self.problem, self.rows)

    def _consume(self, slot: int, run: Held, value: int) -> tuple[Held, Held]:
        old = self._held[value]
        self.before[slot, value] = old
        if isinstance(run, int):
            if not isinstance(old, int):
                old.lowBound = 1
        else:
            self.add_le(f"consume_{slot}_{value}", [run], [old])
        if slot >= self.last_reader[value]:
            return old, self._hold(slot, value, 0)
        new = self._hold_after(slot, value)
        if not isinstance(old, int):
            self.add_le(f"keep_{slot}_{value}", [new], [old])
        return old, self._hold(slot, value, new)

    def _produce(self, slot: int, run: Held, value: int) -> tuple[Held, Held]:
        old = self._held[value]
        if slot >= self.last_reader[value]:
            return old, self._hold(slot, value, 0)
        new = self._hold_after(slot, value)
        if not isinstance(run, int):
            self.add_le(f"produce_{slot}_{value}", [new], [old, run])
            self.add_le(f"once_{slot}_{value}", [run, old], [], 1)
        return old, self._hold(slot, value, new)

    def _peak(self, slot: int, run: Held, op: int) -> None:
        operation = self.graph.operations[op]
        need = (
            sum(self.sizes[v] for v in operation.outputs)
            + operation.workspace_bytes / self.unit_bytes
        )
        terms = dict(self._live)
        rhs = -self._live_constant
        for value in operation.overwrites:  # it takes no memory beside the outputs unless held on
            need -= self.sizes[value]
            held = self._held[value]
            if isinstance(held, int):
                rhs -= held * self.sizes[value]
            else:
                terms[held] = terms.get(held, 0.0) + self.sizes[value]
        if isinstance(run, int):
            rhs -= need
        elif need:
            terms[run] = need
        if isinstance(self.room, pulp.LpVariable):
            terms[self.room] = -1
        else:
            rhs += self.room
        # A row without variables is either void or false; a false one must stay in the program,
        # and solvers take no empty rows.
        if terms:
            self.add(f"peak_{slot}", terms, pulp.LpConstraintLE, rhs)
        elif rhs < 0:
            self.add(
                f"peak_{slot}", {self._variable(f"none{slot:06d}", 0): 1}, pulp.LpConstraintLE, rhs
            )

    def _balance(self, slot: int, change: dict[pulp.LpVariable, float], constant: float) -> None:
        """Bytes held before the next slot: the sum so far, or a variable once that grows long.

        A variable at every slot makes a chain of equalities on which HiGHS's separation of cuts
        crawls (5 s a round on ResNet-50); none at all makes the rows long. Measured best: 40 terms.
        """
        self._live_constant += constant
        if not change:
            return
        terms = dict(self._live)
        for held, size in change.items():
            terms[held] = terms.get(held, 0.0) + size
            if terms[held] == 0.0:
                del terms[held]
        if len(terms) <= SHORT_SUM or not self._writes:
            self._live = terms
            return
        live = self._variable(f"u{slot + 1:06d}", None)
        terms[live] = -1.0
        self.add(f"balance_{slot}", terms, pulp.LpConstraintEQ, -self._live_constant)
        self._live, self._live_constant = {live: 1.0}, 0.0

    def _change(
        self, change: dict[pulp.LpVariable, float], value: int, old: Held, new: Held
    ) -> float:
        constant = 0.0
        for sign, held in ((1.0, new), (-1.0, old)):
            if isinstance(held, int):
                constant += sign * held * self.sizes[value]
            else:
                change[held] = change.get(held, 0.0) + sign * self.sizes[value]
        return constant

    def _hold(self, slot: int, value: int, held: Held) -> Held:
        self._held[value] = self.after[slot, value] = held
        return held

    def _set_objective(self) -> None:
        if isinstance(self.room, pulp.LpVariable):
            self.problem.setObjective(expression({self.room: 1.0}))
            return
        unit = self.cost_unit_s
        costs: dict[pulp.LpVariable, float] = {}
        for slot, run in self.runs.items():
            cost_s = self.graph.operations[self.slots.operations[slot]].cost_s
            costs[run] = costs.get(run, 0.0) + cost_s / unit
        total = self.graph.total_cost_s / unit
        self.problem.setObjective(expression(costs, total))

    def _run(self, slot: int) -> pulp.LpVariable:
        key = None if self.ties is None else self.ties.run_class(slot)
        return self._shared(key, f"r{slot:06d}", pulp.LpInteger)

    def _hold_after(self, slot: int, value: int) -> pulp.LpVariable:
        key = None if self.ties is None else self.ties.hold_class(slot, value)
        # No cover cuts to be had from sums over many blocks; integral by itself.
        return self._shared(key, f"h{value:06d}_{slot:06d}", pulp.LpContinuous)

    def _shared(self, key: Hashable, name: str, kind: str) -> pulp.LpVariable:
        """The variable of this class; a new one where there is none yet, or no class."""
        if key is None:
            return self._variable(name, 1, pulp.LpInteger)
        if key not in self._tied:
            self._tied[key] = self._variable(name, 1, kind)
        return self._tied[key]

    def _variable(self, name: str, upper: float | None, cat: str = "Continuous") -> pulp.LpVariable:
        self.columns += 1
        return self.problem.add_variable(name, 0, upper, cat)


def _keep_all_bytes(graph: Graph) -> int:
    return graph.constant_bytes + sum(value.size_bytes for value in graph.values) or 1
