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

Minimise the sum of cost_{op(s)} r_s subject to
    consume   r_s <= h_{d,e-1},  h_{d,e} <= h_{d,e-1}             d an input of s
    produce   h_{d,e} <= h_{d,e-1} + r_s,  r_s + h_{d,e-1} <= 1   d an output of s
    balance   u_{s+1} = u_s + sum_d size_d (h_{d,e} - h_{d,e-1})  d touched at s
    peak      u_s + r_s (output bytes + workspace of op(s)) <= b - constant memory
    group     at most one slot of a group runs, on inputs that are live

where `MilpModel._write_consume` and so on write the rows of these names.

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
from functools import cached_property

from remat.graph import Graph
from remat.milp.identical_blocks import SharedDecisions
from remat.milp.slots import Slots
from remat.milp.solvers.program import (
    AT_MOST,
    EQUAL,
    Column,
    Program,
    ProgramArrays,
    Term,
    cost_unit_s,
    size_unit_bytes,
)

_MAX_SUM_TERMS = 40
"""Number of terms up to which the retained bytes are written as a sum; longer sums get a variable.
"""


class MilpModel:
    """The program over `slots`: least cost within `budget_bytes`, or least peak if that is None.

    With `shared`, slots of one class run together or not at all: a small program, whose bound does
    not hold for other schedules.

    The objective is in units of `cost_unit_s` seconds and includes the mandatory runs, or in units
    of `unit_bytes` bytes and excludes constant memory. `run_columns` are by optional slot.
    `retained` is by slot and value that it reads or produces, from then on; it has no entry for
    values that are always retained. The rows are written in one walk over the slots, whose state is
    what is retained at the current slot.
    """

    def __init__(
        self,
        graph: Graph,
        slots: Slots,
        budget_bytes: int | None,
        shared: SharedDecisions | None = None,
    ) -> None:
        self.graph = graph
        self.slots = slots
        self.program = Program()
        self.unit_bytes = size_unit_bytes(
            _total_graph_bytes(graph) if budget_bytes is None else budget_bytes
        )
        self.cost_unit_s = cost_unit_s(graph)
        self._shared = shared
        self._shared_columns: dict[Hashable, Column] = {}
        self._writes_rows = True
        """True if rows are written for the current slot."""
        self._sizes = [value.size_bytes / self.unit_bytes for value in graph.values]
        self.run_columns: dict[int, Column] = {
            slot: self._run_column(slot)
            for slot, optional in enumerate(slots.is_optional)
            if optional
        }
        self._available: float | Column = (
            self.program.add_column("b")
            if budget_bytes is None
            else (budget_bytes - graph.constant_bytes) / self.unit_bytes
        )
        self._retained_before: dict[tuple[int, int], Term] = {}
        """By slot and value that it reads: whether the value is retained before the slot."""
        self.retained: dict[tuple[int, int], Term] = {}
        self._last_reader = [-1] * len(graph.values)
        for slot, op in enumerate(slots.operations):
            for v in graph.operations[op].inputs:
                self._last_reader[v] = slot
        self._first_slot = {op: slot for slot, op in reversed([*enumerate(slots.operations)])}
        """The slot of the first run of each operation: a recomputation overwrites nothing, since
        whether it runs is a variable, too."""
        self._retained_now: list[Term] = [0] * len(graph.values)
        self._live: dict[Column, float] = {}
        self._live_constant = 0.0
        self._write_slots()
        self._writes_rows = True
        self._write_group_cuts()
        self._write_objective()

    @cached_property
    def arrays(self) -> ProgramArrays:
        """The program as arrays."""
        return self.program.arrays()

    def _has_no_column(self, value: int) -> bool:
        """True for results, which are always retained, and for values without bytes: no variable
        decides on them."""
        return value in self.graph.results or self._sizes[value] == 0

    def _has_rows(self, slot: int) -> bool:
        """True unless another slot that shares this slot's decisions has the same rows."""
        return self._shared is None or self._shared.has_rows[slot]

    def _write_slots(self) -> None:
        """Write the rows of every slot, in order."""
        for slot, op in enumerate(self.slots.operations):
            run = self.run_columns.get(slot, 1)
            operation = self.graph.operations[op]
            overwrites = operation.overwrites if slot == self._first_slot[op] else ()
            self._writes_rows = self._has_rows(slot)
            if not overwrites:
                self._write_peak(run, op, ())
            change: dict[Column, float] = {}
            constant = 0.0
            for value in operation.inputs:
                if not self._has_no_column(value):
                    old, new = self._write_consume(slot, run, value)
                    constant += self._add_byte_change(change, value, old, new)
            if overwrites:  # whether an overwritten value is retained is decided now
                self._write_peak(run, op, overwrites)
            for value in operation.outputs:
                if not self._has_no_column(value):
                    old, new = self._write_produce(slot, run, value)
                    constant += self._add_byte_change(change, value, old, new)
                elif isinstance(run, int):
                    constant += self._sizes[value]
            self._write_balance(slot, change, constant)

    def _write_group_cuts(self) -> None:
        """Write the rows that tighten the relaxation for every group of more than one slot.

        Take an operation v and a group G of its slots of which at most one runs. Whichever slot
        runs, each input d of v must be live: retained since before the group began, or produced
        again in between. So for every input d, produced by p, and every t in G

            sum_{s in G, s <= t} r_s
                <=  h_{d, before first(G)} + sum_{slots q of p, first(G) < q < t} r_q

        Otherwise the relaxation runs a quarter of v in each of four slots and retains only a
        quarter of d: on a 12-layer GPT at half its memory the LP bound is 2.65% of extra time
        without these rows and 5.69% with them, the optimum being 6.17%.
        """
        slots_of: dict[int, list[int]] = {}
        for slot in self.run_columns:
            slots_of.setdefault(self.slots.operations[slot], []).append(slot)
        for group in self.slots.groups:
            if len(group) < 2 or not all(self._has_rows(slot) for slot in group):
                continue
            runs = [self.run_columns[slot] for slot in group]
            self._add_at_most(runs, [], 1)
            operation = self.graph.operations[self.slots.operations[group[0]]]
            for value in operation.inputs:
                if self._has_no_column(value):
                    continue
                producer_slots = slots_of.get(self.graph.producer[value], [])
                retained = self._retained_before[group[0], value]
                renewed = self._first_slot.get(self.graph.renewal.get(value, -1), -1)
                for count, last_slot in enumerate(group[1:], start=2):
                    if group[0] < renewed < last_slot:
                        break  # from there on, the value is live without a recomputation
                    producer_runs = [
                        self.run_columns[q] for q in producer_slots if group[0] < q < last_slot
                    ]
                    self._add_at_most(runs[:count], [retained, *producer_runs])

    def _add_at_most(self, left: Iterable[Term], right: Iterable[Term], rhs: int = 0) -> None:
        """Write the row: sum(left) <= sum(right) + rhs."""
        if self._writes_rows:
            terms = [*((1.0, term) for term in left), *((-1.0, term) for term in right)]
            self.program.add_terms(terms, AT_MOST, rhs)

    def _write_consume(self, slot: int, run: Term, value: int) -> tuple[Term, Term]:
        """Write the rows `consume` of an input of a slot. Return the terms for retaining the value
        before and after the slot."""
        old = self._retained_now[value]
        self._retained_before[slot, value] = old
        if not isinstance(run, int):
            self._add_at_most([run], [old])
        elif not isinstance(old, int):
            old.lower = 1
        if slot >= self._last_reader[value]:
            return old, self._set_retained(slot, value, 0)
        new = self._retention_column(slot, value)
        if not isinstance(old, int):
            self._add_at_most([new], [old])
        return old, self._set_retained(slot, value, new)

    def _write_produce(self, slot: int, run: Term, value: int) -> tuple[Term, Term]:
        """Write the rows `produce` of an output of a slot. Return the terms for retaining the value
        before and after the slot."""
        old = self._retained_now[value]
        if slot >= self._last_reader[value]:
            return old, self._set_retained(slot, value, 0)
        new = self._retention_column(slot, value)
        if not isinstance(run, int):
            self._add_at_most([new], [old, run])
            self._add_at_most([run, old], [], 1)
        return old, self._set_retained(slot, value, new)

    def _write_peak(self, run: Term, op: int, overwrites: tuple[int, ...]) -> None:
        """Write the row `peak` of a slot, whose operation writes over the values `overwrites`."""
        if not self._writes_rows:
            return
        operation = self.graph.operations[op]
        need = (
            sum(self._sizes[v] for v in operation.outputs)
            + operation.workspace_bytes / self.unit_bytes
        )
        terms: list[tuple[float, Term]] = [(size, x) for x, size in self._live.items()]
        # An overwritten value takes no memory in addition to the outputs unless it is retained.
        for value in overwrites:
            need -= self._sizes[value]
            terms.append((self._sizes[value], self._retained_now[value]))
        if need:
            terms.append((need, run))
        rhs = -self._live_constant
        if isinstance(self._available, Column):
            terms.append((-1.0, self._available))
        else:
            rhs += self._available
        self.program.add_terms(terms, AT_MOST, rhs)

    def _write_balance(self, slot: int, change: dict[Column, float], constant: float) -> None:
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
        if len(terms) <= _MAX_SUM_TERMS or not self._writes_rows:
            self._live = terms
            return
        live = self.program.add_column(f"u{slot + 1:06d}")
        self.program.add_row({**terms, live: -1.0}, EQUAL, -self._live_constant)
        self._live, self._live_constant = {live: 1.0}, 0.0

    def _add_byte_change(
        self, change: dict[Column, float], value: int, old: Term, new: Term
    ) -> float:
        """Add the size of a value to `change` for its new term, and subtract it for the old one.
        Return the change by terms that are fixed."""
        constant = 0.0
        for sign, term in ((1.0, new), (-1.0, old)):
            if isinstance(term, int):
                constant += sign * term * self._sizes[value]
            else:
                change[term] = change.get(term, 0.0) + sign * self._sizes[value]
        return constant

    def _set_retained(self, slot: int, value: int, term: Term) -> Term:
        """Set the term for retaining a value from a slot to its next event, and return it."""
        self._retained_now[value] = self.retained[slot, value] = term
        return term

    def _write_objective(self) -> None:
        """Set the objective: the cost of all runs or, without a budget, the peak."""
        program = self.program
        if isinstance(self._available, Column):
            program.costs = {self._available: 1.0}
            return
        for slot, run in self.run_columns.items():
            cost_s = self.graph.operations[self.slots.operations[slot]].cost_s
            program.costs[run] = program.costs.get(run, 0.0) + cost_s / self.cost_unit_s
        program.offset = self.graph.total_cost_s / self.cost_unit_s

    def _run_column(self, slot: int) -> Column:
        """Return the variable for running a slot."""
        key = None if self._shared is None else self._shared.run_key(slot)
        return self._shared_column(key, f"r{slot:06d}", is_integer=True)

    def _retention_column(self, slot: int, value: int) -> Column:
        """Return the variable for retaining a value from a slot to its next event."""
        key = None if self._shared is None else self._shared.retention_key(slot, value)
        # Sums over many blocks give no cover cuts; the variable is integral without being declared
        # so.
        return self._shared_column(key, f"h{value:06d}_{slot:06d}", is_integer=key is None)

    def _shared_column(self, key: Hashable, name: str, *, is_integer: bool) -> Column:
        """Return the variable of this key; a new one for a new key, or for none."""
        column = None if key is None else self._shared_columns.get(key)
        if column is None:
            column = self.program.add_column(name, 0, 1, is_integer=is_integer)
            if key is not None:
                self._shared_columns[key] = column
        return column


def _total_graph_bytes(graph: Graph) -> int:
    """Return the bytes of all values and of the constant memory; 1 for none."""
    return graph.constant_bytes + sum(value.size_bytes for value in graph.values) or 1
