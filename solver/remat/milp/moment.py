"""The relaxation at one moment: a bound for every schedule of the order, in a fraction of a second.

Take the first run of one operation t, the *moment*. Whatever a schedule does, some set of values
is in memory then, inputs, outputs and workspace of t included, and it fits the budget. Every value
that is read after the moment and was made before it is in that set, or its operation runs again
after the moment; and then so it is with the inputs of that operation. The cheapest choice is a
program with a few variables for each operation before the moment and one knapsack row, and it
bounds the cost of every schedule that runs the operations for the first time in the graph's order:

    minimise  sum_v cost_v r_v          r_v: v runs again after the moment
    h_d + r_{p(d)} >= 1                 d made before the moment, read by a first run after it
    h_d + r_{p(d)} >= r_v               d an input of v, p(d) its operation
    sum_d size_d h_d <= budget - (constant memory, results so far, outputs and workspace of t)
    h_d = 1 for inputs d of t, all in [0, 1]

Without the knapsack row it is a closure problem with an integral optimum, so the relaxation of the
integers costs little, and the integer program is small enough to be solved. At the moment where
memory without recomputation peaks, which is mostly the start of the backward pass, the bound is
often the optimum; what the relaxation leaves out is the memory that the recomputations
themselves need later. The values it holds are also the best advice on what to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pulp

from remat.graph import Graph
from remat.milp.highs import BulkHiGHS

COST_SCALE = 1000.0
"""The cost of one step without recomputation, in units of the objective."""

SAFETY = 1e-7
"""Of the total cost: what the solver's tolerances may have added to a bound."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is proved at the first run of `operation`.

    No schedule of the order within the budget takes less than `bound_s` in all; the cheapest way
    past this moment holds each value of `held` to this share (0 to 1), values not named not at all.
    """

    operation: int
    bound_s: float
    held: dict[int, float]


@dataclass(frozen=True, slots=True)
class _Relaxation:
    problem: pulp.LpProblem
    held: dict[int, pulp.LpVariable]
    again: dict[int, pulp.LpVariable]
    cost_unit_s: float


def at(graph: Graph, budget_bytes: int, operation: int) -> Moment | None:
    """The linear relaxation at one moment; None if nothing fits at it (or the solver fails)."""
    relaxation = _relax(graph, budget_bytes, operation)
    highs = BulkHiGHS(gap=0.0, time_limit=60.0, threads=1)
    relaxation.problem.solve(highs)
    return _read(graph, relaxation, operation, highs)


def integral(
    graph: Graph,
    budget_bytes: int,
    operation: int,
    *,
    gap: float,
    time_limit: float,
    cancelled: Callable[[], bool] | None = None,
) -> Moment | None:
    """The integer program at one moment, to `gap`: a higher bound, and values held or not."""
    relaxation = _relax(graph, budget_bytes, operation)
    for variable in (*relaxation.held.values(), *relaxation.again.values()):
        variable.cat = pulp.LpInteger
    highs = BulkHiGHS(gap=gap, time_limit=time_limit, threads=1, cancelled=cancelled)
    relaxation.problem.solve(highs)
    return _read(graph, relaxation, operation, highs)


def _read(graph: Graph, relaxation: _Relaxation, operation: int, highs: BulkHiGHS) -> Moment | None:
    answer = highs.answer
    if answer is None or answer.objective is None or answer.bound is None:
        return None
    bound_s = (answer.bound - SAFETY * COST_SCALE) * relaxation.cost_unit_s
    held = {v: float(h.varValue or 0.0) for v, h in relaxation.held.items()}
    return Moment(operation, max(bound_s, graph.total_cost_s), held)


def _relax(graph: Graph, budget_bytes: int, moment: int) -> _Relaxation:
    operations, producer = graph.operations, graph.producer
    size = [value.size_bytes for value in graph.values]
    problem = pulp.LpProblem("moment", pulp.LpMinimize)
    held: dict[int, pulp.LpVariable] = {}
    again: dict[int, pulp.LpVariable] = {}
    rows: list[tuple[str, pulp.LpConstraint]] = []
    waiting: list[int] = []

    def want(value: int, run: pulp.LpVariable | None) -> None:
        """`value` is read after the moment: always, or if `run` is 1."""
        if value in graph.results or size[value] == 0:
            return
        if value not in held:
            held[value] = problem.add_variable(f"h{value:06d}", 0, 1)
        terms = {held[value]: 1.0}
        maker = producer[value]
        if operations[maker].recomputable:
            if maker not in again:
                again[maker] = problem.add_variable(f"r{maker:06d}", 0, 1)
                waiting.append(maker)
            terms[again[maker]] = 1.0
        if run is not None:
            terms[run] = terms.get(run, 0.0) - 1.0
        expression = pulp.LpAffineExpression(terms)
        rhs = 1.0 if run is None else 0.0
        rows.append(
            (f"want_{len(rows)}", pulp.LpConstraint(expression, pulp.LpConstraintGE, rhs=rhs))
        )

    first = operations[moment]
    wanted = {v for o in operations[moment:] for v in o.inputs if producer[v] < moment}
    for value in sorted(wanted):
        want(value, None)
    while waiting:
        maker = waiting.pop()
        for value in operations[maker].inputs:
            want(value, again[maker])
    for value in first.inputs:
        if value in held:
            held[value].lowBound = 1
    there = first.workspace_bytes + graph.constant_bytes
    there += sum(size[v] for v in first.outputs)
    there += sum(size[v] for v in graph.results if producer[v] < moment)
    unit_bytes = max(1.0, budget_bytes / 1000)
    room = pulp.LpAffineExpression({h: size[v] / unit_bytes for v, h in held.items()})
    rows.append(
        (
            "room",
            pulp.LpConstraint(room, pulp.LpConstraintLE, rhs=(budget_bytes - there) / unit_bytes),
        )
    )
    unit_s = graph.total_cost_s / COST_SCALE or 1.0
    problem.setObjective(
        pulp.LpAffineExpression(
            {r: operations[op].cost_s / unit_s for op, r in again.items()}, constant=COST_SCALE
        )
    )
    problem.extend(rows)
    return _Relaxation(problem, held, again, unit_s)


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
