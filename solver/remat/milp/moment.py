"""The relaxation at a few moments: a bound for every schedule of the order, in a second or less.

A *moment* is the first run of some operation. Whatever a schedule does, some set of values is in
memory then, inputs, outputs and workspace of the operation included, and it fits the budget. Take
moments t_1 < ... < t_K, and t_{K+1} for the end. For the *span* from t_k to t_l, k < l:

* what was made before t_k and is read by a first run in the span, or is in memory at t_l, was in
  memory at t_k, or its operation runs again in the span;
* and then the same holds for the inputs of that operation.

    minimise  sum_{v,k} cost_v r_{v,k}         r_{v,k}: v runs again between t_k and t_{k+1}
    h_{d,k} + y_{p(d),k,l} >= 1                d read by a first run in the span, p(d) its operation
    h_{d,k} + y_{p(d),k,l} >= h_{d,l}          d in memory at t_l
    h_{d,k} + y_{p(d),k,l} >= y_{v,k,l}        d an input of v
    y_{v,k,l} <= sum_{k <= j < l} r_{v,j}      y_{v,k,l}: v runs again in the span
    sum_d size_d h_{d,k} <= budget - (constant memory, results so far, outputs and workspace of t_k)
    h_{d,k} = 1 for inputs d of t_k; all in {0, 1}

Every schedule of the order gives a solution of no larger cost, so the optimum, and the bound that a
solver proves on the way to it, hold for all of them. What is relaxed is the memory between the
moments. With one moment there is a single knapsack row beside a closure problem: the linear
relaxation costs little, and at the moment where memory without recomputation peaks, mostly the
start of the backward pass, the bound is often the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pulp

from remat.errors import SolverError
from remat.graph import Graph
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import BulkHiGHS
from remat.milp.solvers.pulp_versions import Arrays, expression
from remat.schedule import Schedule
from remat.simulate import simulate

COST_SCALE = 1000.0
"""The cost of one step without recomputation, in units of the objective."""

SAFETY = 1e-7
"""Of the total cost: what the solver's tolerances may have added to a bound."""

_OPTIONS = {"presolve": "off"}
"""For integer programs: 0.1 s instead of 1.3 (ResNet-50), 0.4 instead of 3.0 (DenseNet-121), 4.8
instead of 6.9 (Checkmate's ResNet-50), to the same bounds; nothing was slower."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What is proved at the first runs of `operations`, in order.

    No schedule of the order within the budget takes less than `bound_s` in all; the cheapest way
    past the moments has each value of `held[k]` in memory at the k-th to this share (0 to 1), and
    values not named not at all.
    """

    operations: tuple[int, ...]
    bound_s: float
    held: tuple[dict[int, float], ...]


def linear(graph: Graph, budget_bytes: int, operations: Sequence[int]) -> Moments | None:
    """The linear relaxation at these moments; None if nothing fits (or the solver fails)."""
    relaxation = _Relaxation(graph, budget_bytes, operations)
    program = pulp_versions.read(relaxation.problem)
    return _solve(graph, relaxation, program, gap=0.0, time_limit=60.0)


def integral(
    graph: Graph,
    budget_bytes: int,
    operations: Sequence[int],
    *,
    gap: float,
    time_limit: float,
    known: Schedule | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Moments | None:
    """The integer program at these moments, to `gap`: a higher bound, and values held or not.

    `known` is a schedule within the budget, to begin from.
    """
    relaxation = _Relaxation(graph, budget_bytes, operations)
    program = pulp_versions.read(relaxation.problem).integral()
    start = None if known is None else relaxation.values(known)
    return _solve(graph, relaxation, program, gap, time_limit, start, cancelled)


def candidates(during_bytes: tuple[int, ...], budget_bytes: int, pieces: int) -> list[int]:
    """Operations worth being the moment, the likeliest first: where memory without recomputation
    (`during_bytes`, operation by operation) is highest, all over the stretch above the budget."""
    above = [op for op, used in enumerate(during_bytes) if used > budget_bytes]
    if not above:
        return []
    start, length = above[0], above[-1] + 1 - above[0]
    borders = sorted({start + length * piece // pieces for piece in range(pieces + 1)})
    peaks = {max(range(a, b), key=during_bytes.__getitem__) for a, b in pairwise(borders)}
    return sorted(peaks, key=lambda op: (-during_bytes[op], op))


def _solve(
    graph: Graph,
    relaxation: _Relaxation,
    program: Arrays,
    gap: float,
    time_limit: float,
    start: dict[pulp.LpVariable, float] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Moments | None:
    highs = BulkHiGHS(
        gap=gap,
        time_limit=time_limit,
        threads=1,
        start=start,
        cancelled=cancelled,
        options=_OPTIONS if gap else None,
    )
    try:
        answer = highs.solve(program)
    except SolverError:
        return None
    if answer.objective is None or answer.bound is None:
        return None
    bound_s = (answer.bound - SAFETY * COST_SCALE) * relaxation.cost_unit_s
    held = tuple(
        {v: float(h.varValue or 0.0) for v, h in at_moment.items()} for at_moment in relaxation.held
    )
    return Moments(relaxation.moments, max(bound_s, graph.total_cost_s), held)


@dataclass
class _Span:
    """Values wanted between two moments; `again` says which operations run again for them."""

    start: int
    end: int
    again: dict[int, pulp.LpVariable] = field(default_factory=dict[int, pulp.LpVariable])
    waiting: list[int] = field(default_factory=list[int])


class _Relaxation:
    def __init__(self, graph: Graph, budget_bytes: int, operations: Sequence[int]) -> None:
        self.graph = graph
        self.moments = tuple(sorted(set(operations)))
        self.problem = pulp.LpProblem("moments", pulp.LpMinimize)
        self.held: list[dict[int, pulp.LpVariable]] = [{} for _ in self.moments]
        self.runs: list[dict[int, pulp.LpVariable]] = [{} for _ in self.moments]
        self.spans: list[_Span] = []
        self.cost_unit_s = graph.total_cost_s / COST_SCALE or 1.0
        self._rows: list[tuple[str, dict[pulp.LpVariable, float], int, float]] = []
        count = len(self.moments)
        reads = [
            {v for o in graph.operations[a:b] for v in o.inputs}
            for a, b in pairwise((*self.moments, len(graph)))
        ]
        # From the last moment on: what is in memory at it is wanted by the spans that end there.
        for start in reversed(range(count)):
            for end in range(count, start, -1):
                self._want(start, end, set[int]().union(*reads[start:end]))
            self._room(start, budget_bytes)
        self.problem.setObjective(
            expression(
                {
                    run: graph.operations[op].cost_s / self.cost_unit_s
                    for window in self.runs
                    for op, run in window.items()
                },
                graph.total_cost_s / self.cost_unit_s,
            )
        )
        pulp_versions.add_rows(self.problem, self._rows)

    def values(self, schedule: Schedule) -> dict[pulp.LpVariable, float]:
        """This schedule as a solution."""
        timeline = simulate(self.graph, schedule)
        first: dict[int, int] = {}
        for run, op in enumerate(schedule.runs):
            first.setdefault(op, run)
        at = [first[op] for op in self.moments]
        values: dict[pulp.LpVariable, float] = {}
        for run, held in zip(at, self.held, strict=True):
            values |= dict.fromkeys(held.values(), 0.0)
            values |= {held[v]: 1.0 for v in timeline.live(run) if v in held}
        borders = [*at, len(schedule)]
        again = [
            {op for run, op in enumerate(schedule.runs[a:b], start=a) if first[op] < run}
            for a, b in pairwise(borders)
        ]
        for ran, window in zip(again, self.runs, strict=True):
            values |= {run: float(op in ran) for op, run in window.items()}
        for span in self.spans:
            ran = set[int]().union(*again[span.start : span.end])
            values |= {y: float(op in ran) for op, y in span.again.items()}
        return values

    def _want(self, start: int, end: int, read: Iterable[int]) -> None:
        span = _Span(start, end)
        before = self.moments[start]
        producer = self.graph.producer
        for value in sorted(v for v in read if producer[v] < before):
            self._demand(span, value, None)
        if end < len(self.moments):
            for value, held in self.held[end].items():
                if producer[value] < before:
                    self._demand(span, value, held)
        while span.waiting:
            op = span.waiting.pop()
            for value in self.graph.operations[op].inputs:
                self._demand(span, value, span.again[op])
        if end > start + 1:
            self.spans.append(span)
            for op, y in span.again.items():
                runs = [self._run(j, op) for j in range(start, end)]
                self._row(dict.fromkeys(runs, 1.0) | {y: -1.0}, 0.0)

    def _demand(self, span: _Span, value: int, by: pulp.LpVariable | None) -> None:
        """`value` is wanted in the span: always, or if `by` is 1."""
        graph = self.graph
        if value in graph.results or graph.values[value].size_bytes == 0:
            return
        terms = {self._hold(span.start, value): 1.0}
        op = graph.producer[value]
        if graph.operations[op].recomputable:
            if op not in span.again:
                span.again[op] = (
                    self._run(span.start, op)
                    if span.end == span.start + 1
                    else self.problem.add_variable(f"y{span.start}_{span.end}_{op}", 0, 1)
                )
                span.waiting.append(op)
            terms[span.again[op]] = 1.0
        if by is None:
            self._row(terms, 1.0)
        else:
            terms[by] = terms.get(by, 0.0) - 1.0
            self._row(terms, 0.0)

    def _room(self, moment: int, budget_bytes: int) -> None:
        graph, before = self.graph, self.moments[moment]
        size = [value.size_bytes for value in graph.values]
        held = self.held[moment]
        for value in graph.operations[before].inputs:
            if value in held:
                held[value].lowBound = 1
        there = graph.least_made_bytes[before] + graph.constant_bytes
        there += sum(size[v] for v in graph.results if graph.producer[v] < before)
        unit_bytes = max(1.0, budget_bytes / 1000)
        terms = {h: -size[v] / unit_bytes for v, h in held.items()}
        self._row(terms, (there - budget_bytes) / unit_bytes)

    def _hold(self, moment: int, value: int) -> pulp.LpVariable:
        held = self.held[moment]
        if value not in held:
            held[value] = self.problem.add_variable(f"h{moment}_{value}", 0, 1)
        return held[value]

    def _run(self, window: int, op: int) -> pulp.LpVariable:
        runs = self.runs[window]
        if op not in runs:
            runs[op] = self.problem.add_variable(f"r{window}_{op}", 0, 1)
        return runs[op]

    def _row(self, terms: dict[pulp.LpVariable, float], at_least: float) -> None:
        self._rows.append((f"row{len(self._rows)}", terms, pulp.LpConstraintGE, at_least))
