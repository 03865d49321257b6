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

Minimise the sum of cost_{op(s)} r_s (`_set_objective`) subject to
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

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import pulp

from remat.graph import Graph
from remat.milp.slots import Slots
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.pulp_versions import Arrays, expression
from remat.milp.ties import Ties

COST_SCALE = 1000.0
"""The total cost of one step without recomputation, in units of the objective."""

SHORT_SUM = 40
"""Bytes held are written out up to this many terms, and named by a variable beyond."""

Held = pulp.LpVariable | int
"""Whether a value is held: a variable, or 0 or 1 where it is known."""


@dataclass
class Model:
    """A program built by `build`, with what is needed to read its solution."""

    problem: pulp.LpProblem
    slots: Slots
    runs: dict[int, pulp.LpVariable]
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
    from remat.milp.cuts import add_group_cuts

    builder = _Builder(graph, slots, budget_bytes, ties)
    builder.walk()
    add_group_cuts(builder)
    return builder.finish()


class _Builder:
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
        for slot, op in enumerate(self.slots.operations):
            run = self.runs.get(slot, 1)
            operation = self.graph.operations[op]
            self._writes = self.is_written(slot)
            self._peak(slot, run, op)
            change: dict[pulp.LpVariable, float] = {}
            constant = 0.0
            for value in operation.inputs:
                if not self.is_free(value):
                    old, new = self._consume(slot, run, value)
                    constant += self._change(change, value, old, new)
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

    def finish(self) -> Model:
        self._set_objective()
        pulp_versions.add_rows(self.problem, self.rows)
        return Model(
            problem=self.problem,
            slots=self.slots,
            runs=self.runs,
            unit_bytes=self.unit_bytes,
            cost_unit_s=self._cost_unit(),
            rows=len(self.rows),
            columns=self.columns,
        )

    def _consume(self, slot: int, run: Held, value: int) -> tuple[Held, Held]:
        old = self._held[value]
        self.before[slot, value] = old
        if isinstance(run, int):
            if not isinstance(old, int):
                old.lowBound = 1
        else:
            self.add_le(f"consume_{slot}_{value}", [run], [old])
        if slot >= self.last_reader[value]:
            return old, self._hold(value, 0)
        new = self._hold_after(slot, value)
        if not isinstance(old, int):
            self.add_le(f"keep_{slot}_{value}", [new], [old])
        return old, self._hold(value, new)

    def _produce(self, slot: int, run: Held, value: int) -> tuple[Held, Held]:
        old = self._held[value]
        if slot >= self.last_reader[value]:
            return old, self._hold(value, 0)
        new = self._hold_after(slot, value)
        if not isinstance(run, int):
            self.add_le(f"produce_{slot}_{value}", [new], [old, run])
            self.add_le(f"once_{slot}_{value}", [run, old], [], 1)
        return old, self._hold(value, new)

    def _peak(self, slot: int, run: Held, op: int) -> None:
        operation = self.graph.operations[op]
        need = (
            sum(self.sizes[v] for v in operation.outputs)
            + operation.workspace_bytes / self.unit_bytes
        )
        terms = dict(self._live)
        rhs = -self._live_constant
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

    def _hold(self, value: int, held: Held) -> Held:
        self._held[value] = held
        return held

    def _set_objective(self) -> None:
        if isinstance(self.room, pulp.LpVariable):
            self.problem.setObjective(expression({self.room: 1.0}))
            return
        unit = self._cost_unit()
        costs: dict[pulp.LpVariable, float] = {}
        for slot, run in self.runs.items():
            cost_s = self.graph.operations[self.slots.operations[slot]].cost_s
            costs[run] = costs.get(run, 0.0) + cost_s / unit
        total = self.graph.total_cost_s / unit
        self.problem.setObjective(expression(costs, total))

    def _cost_unit(self) -> float:
        return self.graph.total_cost_s / COST_SCALE or 1.0

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
