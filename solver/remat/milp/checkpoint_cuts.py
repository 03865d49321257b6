"""The relaxation at a few checkpoint cuts: a bound for every schedule of the order, in about a
second or less.

A *checkpoint cut* (a *moment* in docs/formulation.md) is the first run of some operation. Whatever
a schedule does, some set of values is live then, inputs, outputs and workspace of the operation
included, and it fits the budget. Take cuts t_1 < ... < t_K, and t_{K+1} for the end. For the *span*
from t_k to t_l, k < l:

* a value that was produced before t_k and that a first run in the span reads, or that is live at
  t_l, was live at t_k, or its operation is recomputed in the span;
* and then the same holds for the inputs of that operation.

    minimise  sum_{v,k} cost_v r_{v,k}         r_{v,k}: v is recomputed between t_k and t_{k+1}
    h_{d,k} + y_{p(d),k,l} >= 1                d read by a first run in the span, p(d) its operation
    h_{d,k} + y_{p(d),k,l} >= h_{d,l}          d live at t_l
    h_{d,k} + y_{p(d),k,l} >= y_{v,k,l}        d an input of v
    y_{v,k,l} <= sum_{k <= j < l} r_{v,j}      y_{v,k,l}: v is recomputed in the span
    sum_d size_d h_{d,k} <= budget - (constant memory, results so far, outputs and workspace of t_k)
    h_{d,k} = 1 for inputs d of t_k; all in {0, 1}

A value that an operation of the span renews has rows only for the first runs before that one.

Every schedule of the order gives a solution of no larger cost, so the optimum, and the bound that a
solver proves on the way to it, hold for all of them. What is relaxed is the memory between the
cuts. With one cut there is a single knapsack row next to a closure problem: the linear relaxation
costs little, and at the operation where memory without recomputation peaks, mostly the start of the
backward pass, the bound is often the optimum.

At one cut t, values may also be on the host (o_d): a bound for every schedule of the order,
whatever it offloads. The first three kinds of rows have o_d on their left, and with w_before and
w_after >= 0

    minimise  w_before + w_after
    w_after >= sum_v cost_v r_v
    sum_d size_d o_d <= host budget
    sum_d size_d o_d / rate_out <= seconds from p(u) to t + w_before        d produced from p(u) on
    sum_d size_d o_d / rate_in  <= seconds from t to r + w_after
                                                          d read by a first run between t and r

One engine makes all copies of a direction, one after the other. A copy to the host starts after the
operation that produces the value, and has ended by t; a copy back starts at t or later, and has
ended when the value is read. `w_before` and `w_after` are the seconds that the step takes in
addition, before and after t, for waiting or recomputing. So every schedule of the order, with every
choice of copies, gives a solution that costs no more. Rows for copies are written for at most
`_MAX_COPY_ROWS` places p(u) and r: fewer rows relax the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from remat.costs.devices import Link
from remat.errors import SolverError
from remat.graph import Graph
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import (
    AT_LEAST,
    COST_SCALE,
    Column,
    Program,
    SolverOutcome,
    SolverRun,
    cost_unit_s,
    value_of,
)
from remat.schedule import Schedule
from remat.simulate import simulate

_BOUND_TOLERANCE = 1e-7
"""Share of the total cost that the solver's tolerances may have added to a bound."""

_MAX_COPY_ROWS = 60
"""Rows for the copies of one direction, at most: each has a term for every value before it."""

_WITHOUT_PRESOLVE: Mapping[str, str | bool] = {"presolve": "off"}
"""For integer programs: 0.1 s instead of 1.3 (ResNet-50), 0.4 instead of 3.0 (DenseNet-121), 4.8
instead of 6.9 (Checkmate's ResNet-50), to the same bounds; nothing was slower. For linear ones of
one cut: half the time, to the same bound but other solutions, which are worse as advice."""

_OFFLOAD_OPTIONS = {**_WITHOUT_PRESOLVE, "mip_heuristic_run_feasibility_jump": False}
"""Feasibility jump takes as long as the rest of an integer program, whose linear relaxation rounds
to within the gap."""


@dataclass(frozen=True, slots=True)
class CheckpointCuts:
    """A solved relaxation at checkpoint cuts: the first runs of `operations`, in order.

    No schedule of the order within the budget takes less than `bound_s` in total. The cheapest
    solution retains each value of `retained[k]` across the k-th cut to this share (0 to 1), and no
    other values.
    """

    operations: tuple[int, ...]
    bound_s: float
    retained: tuple[dict[int, float], ...]


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


def relax_cuts(
    graph: Graph,
    budget_bytes: int,
    operations: Sequence[int],
    *,
    gap: float | None = None,
    time_limit: float = 60.0,
    incumbent: Schedule | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> CheckpointCuts | None:
    """Solve the linear relaxation at these cuts or, with a `gap`, the integer program: a higher
    bound, and values that are either retained or not. None if nothing fits (or the solver fails).

    `incumbent` is a schedule within the budget to start from.
    """
    relaxation = _CutRelaxation(graph, budget_bytes, operations)
    answer = relaxation.run(
        gap,
        time_limit,
        options=None if gap is None else _WITHOUT_PRESOLVE,
        start=None if incumbent is None else relaxation.values(incumbent),
        is_cancelled=is_cancelled,
    )
    if answer is None or answer.objective is None or answer.bound is None:
        return None
    retained = tuple(
        {v: value_of(h) for v, h in columns.items()} for columns in relaxation.retained
    )
    return CheckpointCuts(relaxation.operations, relaxation.bound_s(answer.bound), retained)


def linear_bound_s(graph: Graph, budget_bytes: int, operation: int) -> float:
    """Return the bound in seconds of the linear relaxation at one cut; infinity if nothing fits,
    and the time without recomputation if the solver fails or has no bound in time."""
    relaxation = _CutRelaxation(graph, budget_bytes, [operation])
    answer = relaxation.run(None, 60.0, options=_WITHOUT_PRESOLVE)
    if answer is None:
        return graph.total_cost_s
    if answer.outcome is SolverOutcome.INFEASIBLE:
        return math.inf
    return graph.total_cost_s if answer.bound is None else relaxation.bound_s(answer.bound)


def relax_offload_cut(
    graph: Graph,
    budget_bytes: int,
    operation: int,
    limits: HostLimits,
    *,
    gap: float | None = None,
    time_limit: float = 60.0,
    copy_cost: float = 0.0,
    recomputes: bool = True,
    is_cancelled: Callable[[], bool] | None = None,
) -> OffloadCut | None:
    """Solve the linear relaxation at an operation or, with a `gap`, the integer program, where
    values may be on the host. None if nothing fits, or the solver fails or finds nothing in time.
    The graph is of a step without copies: no operation renews a value.

    `copy_cost` are seconds for each second of copies that are added to the time that is minimised,
    which selects the one of two solutions with fewer copies; `bound_s` is proved only for 0, and
    not without `recomputes`, which leaves recomputation out.
    """
    relaxation = _CutRelaxation(graph, budget_bytes, [operation], limits, recomputes=recomputes)
    relaxation.add_copies(limits, copy_cost)
    answer = relaxation.run(gap, time_limit, options=_OFFLOAD_OPTIONS, is_cancelled=is_cancelled)
    if answer is None or answer.objective is None or answer.bound is None:
        return None

    def chosen(columns: Mapping[int, Column]) -> frozenset[int]:
        return frozenset(key for key, x in columns.items() if x.is_one)

    return OffloadCut(
        operation,
        relaxation.bound_s(answer.bound),
        chosen(relaxation.offloaded),
        chosen(relaxation.retained[0]),
        chosen(relaxation.recomputed[0]),
    )


def candidate_cuts(during_bytes: tuple[int, ...], budget_bytes: int, count: int) -> list[int]:
    """Return operations at which a cut is promising, the most promising first; none if all fits.

    The stretch of operations over the budget is divided into `count` equal ranges. In each range
    it is the operation with the most memory without recomputation (`during_bytes`, by operation).
    """
    above = [op for op, size in enumerate(during_bytes) if size > budget_bytes]
    if not above:
        return []
    start, length = above[0], above[-1] + 1 - above[0]
    borders = sorted({start + length * index // count for index in range(count + 1)})
    peaks = {max(range(a, b), key=during_bytes.__getitem__) for a, b in pairwise(borders)}
    return sorted(peaks, key=lambda op: (-during_bytes[op], op))


@dataclass
class _CutSpan:
    """The operations between two cuts, which are given by their indices. `recomputed` has the
    variable of each operation that may be recomputed between them, and `pending` the operations
    among them whose inputs have no rows yet."""

    start: int
    end: int
    recomputed: dict[int, Column] = field(default_factory=dict[int, Column])
    pending: list[int] = field(default_factory=list[int])


class _CutRelaxation:
    """The program of the module's docstring: `retained` are h, `recomputed` are r, by cut, and
    `offloaded` are o."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        operations: Sequence[int],
        limits: HostLimits | None = None,
        *,
        recomputes: bool = True,
    ) -> None:
        self.graph = graph
        self.operations = tuple(sorted(set(operations)))
        self.program = Program()
        self.retained: list[dict[int, Column]] = [{} for _ in self.operations]
        self.recomputed: list[dict[int, Column]] = [{} for _ in self.operations]
        self.offloaded: dict[int, Column] = {}
        self._spans: list[_CutSpan] = []
        self._may_offload = frozenset[int]() if limits is None else limits.values
        self._recomputes = recomputes
        self._cost_unit_s = cost_unit_s(graph)
        count = len(self.operations)
        borders = (*self.operations, len(graph))
        # From the last cut to the first: the spans that end at a cut need the values that are
        # retained across it.
        for start in reversed(range(count)):
            for end in range(count, start, -1):
                self._add_span(start, end, borders[end])
            self._add_memory_row(start, budget_bytes)
        self.program.costs = {
            run: graph.operations[op].cost_s / self._cost_unit_s
            for runs in self.recomputed
            for op, run in runs.items()
        }
        self.program.offset = graph.total_cost_s / self._cost_unit_s

    def run(
        self,
        gap: float | None,
        time_limit: float,
        *,
        options: Mapping[str, str | bool] | None,
        start: dict[Column, float] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> SolverRun | None:
        """Solve the integer program to the gap, or the linear relaxation without one; None if the
        solver fails."""
        highs = HighsSolver(
            gap=gap or 0.0,
            time_limit=time_limit,
            threads=1,
            start=start,
            is_cancelled=is_cancelled,
            options=options,
        )
        arrays = self.program.arrays()
        try:
            return highs.run(arrays.relaxed() if gap is None else arrays)
        except SolverError:
            return None

    def bound_s(self, bound: float) -> float:
        """Return a bound on the objective, in units of the program, as seconds: less the solver's
        tolerance, and at least the time without recomputation."""
        bound_s = (bound - _BOUND_TOLERANCE * COST_SCALE) * self._cost_unit_s
        return max(bound_s, self.graph.total_cost_s)

    def values(self, schedule: Schedule) -> dict[Column, float]:
        """Return this schedule, which offloads nothing, as values of the program's variables."""
        timeline = simulate(self.graph, schedule)
        first_run: dict[int, int] = {}
        for run, op in enumerate(schedule.runs):
            first_run.setdefault(op, run)
        cut_runs = [first_run[op] for op in self.operations]
        values: dict[Column, float] = {}
        for run, columns in zip(cut_runs, self.retained, strict=True):
            values |= dict.fromkeys(columns.values(), 0.0)
            values |= {columns[v]: 1.0 for v in timeline.live(run) if v in columns}
        borders = [*cut_runs, len(schedule)]
        recomputed = [
            {op for run, op in enumerate(schedule.runs[a:b], start=a) if first_run[op] < run}
            for a, b in pairwise(borders)
        ]
        for operations, columns in zip(recomputed, self.recomputed, strict=True):
            values |= {run: float(op in operations) for op, run in columns.items()}
        for span in self._spans:
            operations = set[int]().union(*recomputed[span.start : span.end])
            values |= {y: float(op in operations) for op, y in span.recomputed.items()}
        return values

    def add_copies(self, limits: HostLimits, copy_cost: float) -> None:
        """Add the rows that offloaded values fit the host's memory and that copies end in time, and
        minimise the seconds that the step takes in addition."""
        graph, link, unit_s = self.graph, limits.link, self._cost_unit_s
        if limits.host_bytes is not None:
            self._add_bytes_row(self.offloaded, limits.host_bytes)
        cut = self.operations[0]
        ends_s = [0.0, *accumulate(operation.cost_s for operation in graph.operations)]
        first_readers = self._first_readers(cut, len(graph))
        until_cut_s = {v: ends_s[cut] - ends_s[graph.producer[v] + 1] for v in self.offloaded}
        until_read_s = {
            v: ends_s[first_readers.get(v, len(graph))] - ends_s[cut] for v in self.offloaded
        }
        before, after = (self.program.add_column(name) for name in ("w_before", "w_after"))
        self._add_copy_rows(until_cut_s, link.to_host_bytes_per_s, before)
        self._add_copy_rows(until_read_s, link.to_device_bytes_per_s, after)
        recomputed = {run: -cost for run, cost in self.program.costs.items()}
        self.program.add_row({**recomputed, after: 1.0}, AT_LEAST, 0.0)
        byte_s = copy_cost * (1 / link.to_host_bytes_per_s + 1 / link.to_device_bytes_per_s)
        self.program.costs = {before: 1.0, after: 1.0} | {
            x: byte_s * graph.values[v].size_bytes / unit_s for v, x in self.offloaded.items()
        }

    def _add_copy_rows(self, available_s: Mapping[int, float], rate: float, wait: Column) -> None:
        """Add the rows that the copies of one direction end in time: each value has `available_s`
        for its copy, and the step waits for `wait` seconds more."""
        ordered = sorted(available_s, key=lambda v: available_s[v])
        stride = -(-len(ordered) // _MAX_COPY_ROWS) or 1
        terms = {wait: 1.0}
        for number, value in enumerate(ordered, start=1):
            copy_s = self.graph.values[value].size_bytes / rate
            terms[self.offloaded[value]] = -copy_s / self._cost_unit_s
            if number % stride == 0 or number == len(ordered):
                self.program.add_row(dict(terms), AT_LEAST, -available_s[value] / self._cost_unit_s)

    def _add_span(self, start: int, end: int, end_operation: int) -> None:
        """Add the rows of the span from cut `start` to cut `end`, before the first run of
        `end_operation`."""
        span = _CutSpan(start, end)
        cut = self.operations[start]
        producer = self.graph.producer
        renewed = {v for v, op in self.graph.renewal.items() if cut <= op < end_operation}
        readers = self._first_readers(cut, end_operation)
        # Of equally good solutions, the order of the rows decides which one is found.
        for value in readers if self._may_offload else sorted(readers):
            self._add_demand(span, value, None)
        if end < len(self.operations):
            for value, retained in self.retained[end].items():
                if producer[value] < cut and value not in renewed:
                    self._add_demand(span, value, retained)
        while span.pending:
            op = span.pending.pop()
            for value in self.graph.operations[op].inputs:
                if value not in renewed:
                    self._add_demand(span, value, span.recomputed[op])
        if end > start + 1:
            self._spans.append(span)
            for op, y in span.recomputed.items():
                runs = [self._recomputed_column(j, op) for j in range(start, end)]
                self.program.add_row(dict.fromkeys(runs, 1.0) | {y: -1.0}, AT_LEAST, 0.0)

    def _first_readers(self, cut: int, end_operation: int) -> dict[int, int]:
        """Return, for each value that is produced before a cut, the first operation from the cut on
        that reads it. Values that nothing reads before `end_operation`, or only after they are
        renewed, are left out."""
        graph = self.graph
        readers: dict[int, int] = {}
        for op in range(cut, end_operation):
            for v in graph.operations[op].inputs:
                if graph.producer[v] < cut and not cut <= graph.renewal.get(v, -1) <= op:
                    readers.setdefault(v, op)
        return readers

    def _add_demand(self, span: _CutSpan, value: int, condition: Column | None) -> None:
        """Add the row that `value` is retained at the start of the span, on the host, or recomputed
        in the span: always, or if the variable `condition` is 1. Results and values without bytes
        need no row."""
        graph, program = self.graph, self.program
        if value in graph.results or graph.values[value].size_bytes == 0:
            return
        terms = {
            self._shared_binary(self.retained[span.start], f"h{span.start}_{value}", value): 1.0
        }
        if value in self._may_offload:
            terms[self._shared_binary(self.offloaded, f"o{value}", value)] = 1.0
        op = graph.producer[value]
        is_recomputable = graph.operations[op].recomputable
        if condition is None:  # a first run reads it, at the end of such a span perhaps
            is_recomputable = graph.may_recompute(op, self.operations[span.start])
        if is_recomputable and self._recomputes:
            if op not in span.recomputed:
                span.recomputed[op] = (
                    self._recomputed_column(span.start, op)
                    if span.end == span.start + 1
                    else program.add_binary(f"y{span.start}_{span.end}_{op}")
                )
                span.pending.append(op)
            terms[span.recomputed[op]] = 1.0
        if condition is not None:
            terms[condition] = terms.get(condition, 0.0) - 1.0
        program.add_row(terms, AT_LEAST, float(condition is None))

    def _add_memory_row(self, cut: int, budget_bytes: int) -> None:
        """Add the row that the values retained across a cut fit the budget, next to what its
        operation produces; and fix the inputs of that operation as retained."""
        graph, op = self.graph, self.operations[cut]
        retained = self.retained[cut]
        for value in graph.operations[op].inputs:
            if value in retained:
                retained[value].lower = 1.0
        fixed_bytes = graph.min_produced_bytes[op] + graph.constant_bytes
        fixed_bytes += sum(
            graph.values[v].size_bytes for v in graph.results if graph.producer[v] < op
        )
        self._add_bytes_row(retained, budget_bytes - fixed_bytes)

    def _add_bytes_row(self, columns: Mapping[int, Column], limit_bytes: int) -> None:
        """Add the row that the values whose variables are 1 take at most `limit_bytes`."""
        unit_bytes = max(1.0, limit_bytes / 1000)
        sizes = {x: -self.graph.values[v].size_bytes / unit_bytes for v, x in columns.items()}
        self.program.add_row(sizes, AT_LEAST, -limit_bytes / unit_bytes)

    def _recomputed_column(self, cut: int, op: int) -> Column:
        """Return the variable for recomputing `op` between a cut and the next."""
        return self._shared_binary(self.recomputed[cut], f"x{cut}_{op}", op)

    def _shared_binary(self, columns: dict[int, Column], name: str, key: int) -> Column:
        """Return the binary variable of a key in `columns`; add it under `name` if it is
        missing."""
        if key not in columns:
            columns[key] = self.program.add_binary(name)
        return columns[key]
