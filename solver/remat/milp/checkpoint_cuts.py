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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from remat.errors import SolverError
from remat.graph import Graph
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program_arrays import ArrayProgram, Column, ProgramArrays, SolverOutcome
from remat.schedule import Schedule
from remat.simulate import simulate

COST_SCALE = 1000.0
"""The cost of one step without recomputation, in units of the objective."""

BOUND_TOLERANCE = 1e-7
"""Share of the total cost that the solver's tolerances may have added to a bound."""

WITHOUT_PRESOLVE = {"presolve": "off"}
"""For integer programs: 0.1 s instead of 1.3 (ResNet-50), 0.4 instead of 3.0 (DenseNet-121), 4.8
instead of 6.9 (Checkmate's ResNet-50), to the same bounds; nothing was slower. For linear ones of
one cut: half the time, to the same bound but other solutions, which are worse as advice."""


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


def solve_linear(
    graph: Graph, budget_bytes: int, operations: Sequence[int]
) -> CheckpointCuts | None:
    """Solve the linear relaxation at these cuts; None if nothing fits (or the solver fails)."""
    relaxation = _CutProgram(graph, budget_bytes, operations)
    program = relaxation.program.arrays()
    return _solve(graph, relaxation, program, gap=0.0, time_limit=60.0)


def linear_bound_s(graph: Graph, budget_bytes: int, operation: int) -> float:
    """Return the bound of the linear relaxation at one cut; infinity if it is proved that nothing
    fits, and the time without recomputation if the solver fails."""
    relaxation = _CutProgram(graph, budget_bytes, [operation])
    program = relaxation.program.arrays()
    solver = HighsSolver(gap=0.0, time_limit=60.0, threads=1, options=WITHOUT_PRESOLVE)
    try:
        answer = solver.solve(program)
    except SolverError:
        return graph.total_cost_s
    if answer.outcome is SolverOutcome.INFEASIBLE:
        return math.inf
    if answer.bound is None:
        return graph.total_cost_s
    bound_s = (answer.bound - BOUND_TOLERANCE * COST_SCALE) * relaxation.cost_unit_s
    return max(bound_s, graph.total_cost_s)


def solve_integral(
    graph: Graph,
    budget_bytes: int,
    operations: Sequence[int],
    *,
    gap: float,
    time_limit: float,
    incumbent: Schedule | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> CheckpointCuts | None:
    """Solve the integer program at these cuts to `gap`: a higher bound, and values that are either
    retained or not.

    `incumbent` is a schedule within the budget to start from.
    """
    relaxation = _CutProgram(graph, budget_bytes, operations)
    program = relaxation.program.arrays().integral()
    start = None if incumbent is None else relaxation.values(incumbent)
    return _solve(graph, relaxation, program, gap, time_limit, start, is_cancelled)


def candidate_operations(
    during_bytes: tuple[int, ...], budget_bytes: int, pieces: int
) -> list[int]:
    """Return operations at which a cut is promising, the most promising first.

    Memory without recomputation (`during_bytes`, by operation) peaks at them, in each of `pieces`
    parts of the stretch above the budget.
    """
    above = [op for op, size in enumerate(during_bytes) if size > budget_bytes]
    if not above:
        return []
    start, length = above[0], above[-1] + 1 - above[0]
    borders = sorted({start + length * piece // pieces for piece in range(pieces + 1)})
    peaks = {max(range(a, b), key=during_bytes.__getitem__) for a, b in pairwise(borders)}
    return sorted(peaks, key=lambda op: (-during_bytes[op], op))


def _solve(
    graph: Graph,
    relaxation: _CutProgram,
    program: ProgramArrays,
    gap: float,
    time_limit: float,
    start: dict[Column, float] | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> CheckpointCuts | None:
    highs = HighsSolver(
        gap=gap,
        time_limit=time_limit,
        threads=1,
        start=start,
        is_cancelled=is_cancelled,
        options=WITHOUT_PRESOLVE if gap else None,
    )
    try:
        answer = highs.solve(program)
    except SolverError:
        return None
    if answer.objective is None or answer.bound is None:
        return None
    bound_s = (answer.bound - BOUND_TOLERANCE * COST_SCALE) * relaxation.cost_unit_s
    retained = tuple(
        {v: float(h.varValue or 0.0) for v, h in variables.items()}
        for variables in relaxation.retained
    )
    return CheckpointCuts(relaxation.cut_operations, max(bound_s, graph.total_cost_s), retained)


@dataclass
class _Span:
    """The stretch between two cuts, by their indices, with the operations that are recomputed for
    it: variables in `recomputed`, and in `pending` those whose inputs have no rows yet."""

    start: int
    end: int
    recomputed: dict[int, Column] = field(default_factory=dict[int, Column])
    pending: list[int] = field(default_factory=list[int])


class _CutProgram:
    """The program of the module's docstring: `retained` are h, `recomputed` are r, by cut."""

    def __init__(self, graph: Graph, budget_bytes: int, operations: Sequence[int]) -> None:
        self.graph = graph
        self.cut_operations = tuple(sorted(set(operations)))
        self.program = ArrayProgram()
        self.retained: list[dict[int, Column]] = [{} for _ in self.cut_operations]
        self.recomputed: list[dict[int, Column]] = [{} for _ in self.cut_operations]
        self.spans: list[_Span] = []
        self.cost_unit_s = graph.total_cost_s / COST_SCALE or 1.0
        count = len(self.cut_operations)
        borders = (*self.cut_operations, len(graph))
        # From the last cut to the first: the spans that end at a cut need the values that are
        # retained across it.
        for start in reversed(range(count)):
            for end in range(count, start, -1):
                self._add_span(start, end, borders[end])
            self._add_memory_row(start, budget_bytes)
        self.program.costs = {
            run: graph.operations[op].cost_s / self.cost_unit_s
            for runs in self.recomputed
            for op, run in runs.items()
        }
        self.program.offset = graph.total_cost_s / self.cost_unit_s

    def values(self, schedule: Schedule) -> dict[Column, float]:
        """Return this schedule as values of the program's variables."""
        timeline = simulate(self.graph, schedule)
        first_run: dict[int, int] = {}
        for run, op in enumerate(schedule.runs):
            first_run.setdefault(op, run)
        cut_runs = [first_run[op] for op in self.cut_operations]
        values: dict[Column, float] = {}
        for run, variables in zip(cut_runs, self.retained, strict=True):
            values |= dict.fromkeys(variables.values(), 0.0)
            values |= {variables[v]: 1.0 for v in timeline.live(run) if v in variables}
        borders = [*cut_runs, len(schedule)]
        recomputed = [
            {op for run, op in enumerate(schedule.runs[a:b], start=a) if first_run[op] < run}
            for a, b in pairwise(borders)
        ]
        for operations, variables in zip(recomputed, self.recomputed, strict=True):
            values |= {run: float(op in operations) for op, run in variables.items()}
        for span in self.spans:
            operations = set[int]().union(*recomputed[span.start : span.end])
            values |= {y: float(op in operations) for op, y in span.recomputed.items()}
        return values

    def _add_span(self, start: int, end: int, end_operation: int) -> None:
        """Add the rows of the span from cut `start` to cut `end`, before the first run of
        `end_operation`."""
        span = _Span(start, end)
        cut = self.cut_operations[start]
        producer = self.graph.producer
        renewed = {v for v, op in self.graph.renewal.items() if cut <= op < end_operation}
        for value in sorted(self._read_values(cut, end_operation)):
            self._add_demand(span, value, None)
        if end < len(self.cut_operations):
            for value, retained in self.retained[end].items():
                if producer[value] < cut and value not in renewed:
                    self._add_demand(span, value, retained)
        while span.pending:
            op = span.pending.pop()
            for value in self.graph.operations[op].inputs:
                if value not in renewed:
                    self._add_demand(span, value, span.recomputed[op])
        if end > start + 1:
            self.spans.append(span)
            for op, y in span.recomputed.items():
                runs = [self._recomputed_variable(j, op) for j in range(start, end)]
                self.program.add_row(dict.fromkeys(runs, 1.0) | {y: -1.0}, 0.0)

    def _read_values(self, cut: int, end_operation: int) -> set[int]:
        """Return the values from before a cut that first runs from there on read, before they are
        renewed."""
        graph = self.graph
        return {
            v
            for op in range(cut, end_operation)
            for v in graph.operations[op].inputs
            if graph.producer[v] < cut and not cut <= graph.renewal.get(v, -1) <= op
        }

    def _add_demand(self, span: _Span, value: int, condition: Column | None) -> None:
        """Add the row that `value` is retained at the start of the span or recomputed in it:
        always, or if `condition` is 1."""
        graph = self.graph
        if value in graph.results or graph.values[value].size_bytes == 0:
            return
        terms = {self._retained_variable(span.start, value): 1.0}
        op = graph.producer[value]
        cut = self.cut_operations[span.start]
        is_recomputable = graph.operations[op].recomputable
        if condition is None:  # a first run reads it, at the end of such a span perhaps
            is_recomputable = graph.may_recompute(op, cut)
        if is_recomputable:
            if op not in span.recomputed:
                span.recomputed[op] = (
                    self._recomputed_variable(span.start, op)
                    if span.end == span.start + 1
                    else self.program.add_column(f"y{span.start}_{span.end}_{op}", 0, 1)
                )
                span.pending.append(op)
            terms[span.recomputed[op]] = 1.0
        if condition is None:
            self.program.add_row(terms, 1.0)
        else:
            terms[condition] = terms.get(condition, 0.0) - 1.0
            self.program.add_row(terms, 0.0)

    def _add_memory_row(self, cut: int, budget_bytes: int) -> None:
        """Add the row that the values retained across a cut fit the budget."""
        graph, op = self.graph, self.cut_operations[cut]
        size = [value.size_bytes for value in graph.values]
        retained = self.retained[cut]
        for value in graph.operations[op].inputs:
            if value in retained:
                retained[value].lower = 1.0
        fixed_bytes = graph.min_produced_bytes[op] + graph.constant_bytes
        fixed_bytes += sum(size[v] for v in graph.results if graph.producer[v] < op)
        unit_bytes = max(1.0, budget_bytes / 1000)
        terms = {h: -size[v] / unit_bytes for v, h in retained.items()}
        self.program.add_row(terms, (fixed_bytes - budget_bytes) / unit_bytes)

    def _retained_variable(self, cut: int, value: int) -> Column:
        retained = self.retained[cut]
        if value not in retained:
            retained[value] = self.program.add_column(f"h{cut}_{value}", 0, 1)
        return retained[value]

    def _recomputed_variable(self, cut: int, op: int) -> Column:
        """Return the variable for recomputing `op` between a cut and the next."""
        recomputed = self.recomputed[cut]
        if op not in recomputed:
            recomputed[op] = self.program.add_column(f"r{cut}_{op}", 0, 1)
        return recomputed[op]
