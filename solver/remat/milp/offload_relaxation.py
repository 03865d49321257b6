"""The relaxation at one checkpoint cut in which values may also be on the host: a bound for every
schedule of the order, whatever it offloads.

The cut t is the first run of an operation (see `checkpoint_cuts`). A value d that is needed after t
is live at t, or on the host, or recomputed afterwards:

    minimise  w_before + w_after
    w_after >= sum_v cost_v y_v
    h_d + o_d + y_{p(d)} >= 1              d read by a first run from t on, p(d) its operation
    h_d + o_d + y_{p(d)} >= y_v            d an input of v
    sum_d size_d h_d <= budget - (constant memory, results so far, outputs and workspace of t)
    sum_d size_d o_d <= host budget
    sum_d size_d o_d / rate_out <= seconds from p(u) to t + w_before        d produced from p(u) on
    sum_d size_d o_d / rate_in  <= seconds from t to r + w_after
                                                          d read by a first run between t and r
    h_d = 1 for inputs d of t; all in {0, 1}, but w_before, w_after >= 0

One engine makes all copies of a direction, one after the other. A copy to the host starts after the
operation that produces the value, and has ended by t; a copy back starts at t or later, and has
ended when the value is read. `w_before` and `w_after` are the seconds that the step takes in
addition, before and after t, for waiting or recomputing. So every schedule of the order, with every
choice of copies, gives a solution that costs no more. Rows for copies are written for at most
`_MAX_COPY_ROWS` places p(u) and r: fewer rows relax the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from remat.costs.devices import Link
from remat.errors import SolverError
from remat.graph import Graph
from remat.milp.checkpoint_cuts import BOUND_TOLERANCE, COST_SCALE, WITHOUT_PRESOLVE
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program_arrays import ArrayProgram, Column

_MAX_COPY_ROWS = 60
"""Rows for the copies of one direction, at most: each has a term for every value before it."""


_OPTIONS = {**WITHOUT_PRESOLVE, "mip_heuristic_run_feasibility_jump": False}
"""Feasibility jump takes as long as the rest of an integer program, whose linear relaxation rounds
to within the gap."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """The limits of copies: the link, the bytes on the host, and the values that can be
    offloaded."""

    link: Link
    host_bytes: int | None
    values: frozenset[int]


@dataclass(frozen=True, slots=True)
class OffloadCut:
    """A solved relaxation at the first run of `operation`.

    No schedule of the order within the budget takes less than `bound_s` in total, copies included.
    In the cheapest solution the values of `offloaded` are on the host at the cut, those of
    `retained` on the device, and the operations of `recomputed` are recomputed afterwards.
    """

    operation: int
    bound_s: float
    offloaded: frozenset[int]
    retained: frozenset[int]
    recomputed: frozenset[int]


def solve_offload_cut(
    graph: Graph,
    budget_bytes: int,
    operation: int,
    limits: HostLimits,
    *,
    gap: float = 0.0,
    time_limit: float = 60.0,
    copy_cost: float = 0.0,
    recomputes: bool = True,
    is_cancelled: Callable[[], bool] | None = None,
) -> OffloadCut | None:
    """Solve the relaxation at an operation: the integer program to `gap`, or its linear relaxation
    if that is 0. None if nothing fits, or the solver fails or finds nothing in time. The graph is
    that of a step without copies: no operation renews a value.

    `copy_cost` are seconds for each second of copies that are added to the time that is minimised,
    so that of two solutions the one with fewer copies is taken; `bound_s` is proved only for 0, and
    not without `recomputes`, which leaves recomputation out.
    """
    program = _CutProgram(graph, budget_bytes, operation, limits, copy_cost, recomputes)
    arrays = program.program.arrays()
    highs = HighsSolver(
        gap=gap,
        time_limit=time_limit,
        threads=1,
        is_cancelled=is_cancelled,
        options=_OPTIONS,
    )
    try:
        answer = highs.solve(arrays if gap else arrays.relaxed())
    except SolverError:
        return None
    if answer.objective is None or answer.bound is None:
        return None
    bound_s = (answer.bound - BOUND_TOLERANCE * COST_SCALE) * program.cost_unit_s

    def chosen(variables: Mapping[int, Column]) -> frozenset[int]:
        return frozenset(key for key, x in variables.items() if (x.varValue or 0.0) > 0.5)

    return OffloadCut(
        operation,
        max(bound_s, graph.total_cost_s),
        chosen(program.offloaded),
        chosen(program.retained),
        chosen(program.recomputed),
    )


class _CutProgram:
    """The program of the module's docstring: `retained` are h, `offloaded` are o, `recomputed`
    are y."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        operation: int,
        limits: HostLimits,
        copy_cost: float,
        recomputes: bool,
    ) -> None:
        self.graph = graph
        self.operation = operation
        self.limits = limits
        self.recomputes = recomputes
        self.cost_unit_s = graph.total_cost_s / COST_SCALE or 1.0
        self.program = ArrayProgram()
        self.retained: dict[int, Column] = {}
        self.offloaded: dict[int, Column] = {}
        self.recomputed: dict[int, Column] = {}
        self._pending: list[int] = []
        self._waits = [self.program.add_column(name, 0) for name in ("w_before", "w_after")]
        self._first_reader = self._first_readers()
        for value in self._first_reader:
            self._add_demand(value, None)
        while self._pending:
            op = self._pending.pop()
            for value in graph.operations[op].inputs:
                self._add_demand(value, self.recomputed[op])
        self._add_memory_rows(budget_bytes)
        self._add_copy_rows()
        self.program.add_row(
            {
                y: -graph.operations[op].cost_s / self.cost_unit_s
                for op, y in self.recomputed.items()
            }
            | {self._waits[1]: 1.0},
            0.0,
        )
        link = limits.link
        byte_s = copy_cost * (1 / link.to_host_bytes_per_s + 1 / link.to_device_bytes_per_s)
        costs = dict.fromkeys(self._waits, 1.0)
        for value, offloaded in self.offloaded.items():
            costs[offloaded] = byte_s * graph.values[value].size_bytes / self.cost_unit_s
        self.program.costs = costs
        self.program.offset = graph.total_cost_s / self.cost_unit_s

    def _first_readers(self) -> dict[int, int]:
        """Return the first operation from the cut on that reads each value of before."""
        graph = self.graph
        readers: dict[int, int] = {}
        for op in range(self.operation, len(graph)):
            for value in graph.operations[op].inputs:
                if graph.producer[value] < self.operation:
                    readers.setdefault(value, op)
        return readers

    def _add_demand(self, value: int, condition: Column | None) -> None:
        """Add the row that a value is live at the cut, on the host or recomputed: always, or if
        `condition` is 1."""
        graph = self.graph
        if value in graph.results or graph.values[value].size_bytes == 0:
            return
        terms = {self._variable(self.retained, f"h{value}", value): 1.0}
        if value in self.limits.values:
            terms[self._variable(self.offloaded, f"o{value}", value)] = 1.0
        op = graph.producer[value]
        if self.recomputes and graph.operations[op].recomputable:
            if op not in self.recomputed:
                self._pending.append(op)
            terms[self._variable(self.recomputed, f"y{op}", op)] = 1.0
        if condition is not None:
            terms[condition] = terms.get(condition, 0.0) - 1.0
        self.program.add_row(terms, float(condition is None))

    def _add_memory_rows(self, budget_bytes: int) -> None:
        """Add the rows that live values fit the budget, and offloaded ones the host's."""
        graph, op = self.graph, self.operation
        for value in graph.operations[op].inputs:
            if value in self.retained:
                self.retained[value].lower = 1.0
        fixed_bytes = graph.min_produced_bytes[op] + graph.constant_bytes
        fixed_bytes += sum(
            graph.values[v].size_bytes for v in graph.results if graph.producer[v] < op
        )
        self._add_bytes_row(self.retained, budget_bytes - fixed_bytes)
        if self.limits.host_bytes is not None:
            self._add_bytes_row(self.offloaded, self.limits.host_bytes)

    def _add_bytes_row(self, variables: Mapping[int, Column], limit_bytes: int) -> None:
        unit_bytes = max(1.0, limit_bytes / 1000)
        sizes = {x: -self.graph.values[v].size_bytes / unit_bytes for v, x in variables.items()}
        self.program.add_row(sizes, -limit_bytes / unit_bytes)

    def _add_copy_rows(self) -> None:
        """Add the rows that copies end in time."""
        graph, link = self.graph, self.limits.link
        ends_s = [0.0, *accumulate(operation.cost_s for operation in graph.operations)]
        cut_s, last = ends_s[self.operation], len(graph)
        until_cut_s = {v: cut_s - ends_s[graph.producer[v] + 1] for v in self.offloaded}
        until_read_s = {v: ends_s[self._first_reader.get(v, last)] - cut_s for v in self.offloaded}
        wait_before, wait_after = self._waits
        self._add_direction(until_cut_s, link.to_host_bytes_per_s, wait_before)
        self._add_direction(until_read_s, link.to_device_bytes_per_s, wait_after)

    def _add_direction(self, available_s: Mapping[int, float], rate: float, wait: Column) -> None:
        """Add the rows of the copies of one direction, for the seconds that each has."""
        unit_s = self.cost_unit_s
        ordered = sorted(available_s, key=lambda v: available_s[v])
        stride = -(-len(ordered) // _MAX_COPY_ROWS) or 1
        terms = {wait: 1.0}
        for number, value in enumerate(ordered, start=1):
            copy_s = self.graph.values[value].size_bytes / rate
            terms[self.offloaded[value]] = -copy_s / unit_s
            if number % stride == 0 or number == len(ordered):
                self.program.add_row(dict(terms), -available_s[value] / unit_s)

    def _variable(self, variables: dict[int, Column], name: str, key: int) -> Column:
        if key not in variables:
            variables[key] = self.program.add_column(name, 0, 1, is_integer=True)
        return variables[key]
