"""PuLP 3.3 and PuLP 4: what differs between them, so that nothing else has to know.

PuLP 4 keeps a problem in a core written in Rust. Variables and rows are views on it, made anew at
each look: they are equal by their number, and looking at each of them takes its time, so a program
is read once, as arrays (`read`). A row is an expression with a sense, there is no LpConstraint to
construct; a bound that is none is an infinity; `solve` answers with facts and leaves no status on
the problem; columns stand in the order in which they were made, no longer in that of their names.
No CBC comes with it.

What both have is used directly: `LpProblem.add_variable`, `.variables()`, `.setObjective`, the
attributes of variables. `remat.milp.solvers.probe` is a program of its own and has its own few
lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from remat.milp.solvers.outcome import Outcome

IS_4 = hasattr(pulp, "LpSolveStats")

CBC_REMEDY = "pip install 'remat[cbc]'" if IS_4 else "install a PuLP that bundles CBC, or `cbc`"
"""Where CBC comes from: PuLP 3.3 brings one along for most machines."""

_PULP: Any = pulp
"""What is only there in one of the versions."""

_key: Callable[[Any], int] = attrgetter("id") if IS_4 else id
"""Equal for the same variable of one problem. To hash the variable itself takes longer."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a solver of PuLP's says of its run, and in which words."""

    outcome: Outcome
    message: str


@dataclass(frozen=True)
class Arrays:
    """A problem as arrays. Columns are in the order of the variables' names; the entries of row i
    are `starts[i]` to `starts[i + 1]` of `indices` (columns) and `coefficients`.

    A row is the sum of its entries, at most (`senses` -1), exactly (0), or at least (1) `rhs`.
    """

    problem: pulp.LpProblem
    """Kept: without it, PuLP 4's variables are nothing."""
    variables: tuple[pulp.LpVariable, ...]
    costs: NDArray[np.float64]
    offset: float
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    is_integer: NDArray[np.bool_]
    starts: NDArray[np.int32]
    indices: NDArray[np.int32]
    coefficients: NDArray[np.float64]
    senses: NDArray[np.int8]
    rhs: NDArray[np.float64]

    def relaxed(self) -> Arrays:
        """The linear relaxation."""
        return replace(self, is_integer=np.zeros(len(self.variables), dtype=np.bool_))

    def integral(self) -> Arrays:
        """The program in which every variable is an integer."""
        return replace(self, is_integer=np.ones(len(self.variables), dtype=np.bool_))

    def row_levels(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of each row's entries, for a value of each column."""
        of_row = np.repeat(np.arange(len(self.rhs)), np.diff(self.starts))
        terms = self.coefficients * values[self.indices]
        return np.bincount(of_row, terms, minlength=len(self.rhs)).astype(np.float64)


def expression(
    terms: Mapping[pulp.LpVariable, float], constant: float = 0.0
) -> pulp.LpAffineExpression:
    """The sum of the terms and the constant."""
    if IS_4:
        return _PULP.LpAffineExpression.from_dict(terms, constant)
    return pulp.LpAffineExpression(terms, constant=constant)


def add_rows(
    problem: pulp.LpProblem,
    rows: Iterable[tuple[str, Mapping[pulp.LpVariable, float], int, float]],
) -> None:
    """Add rows to a problem: (name, terms, sense, right-hand side), named differently."""
    if IS_4:
        for name, terms, sense, rhs in rows:
            row: Any = expression(terms, -rhs)
            row.sense = sense
            problem.addConstraint(row, name)
    else:
        problem.extend(
            (name, pulp.LpConstraint(expression(terms), sense, rhs=rhs))
            for name, terms, sense, rhs in rows
        )


def read(problem: pulp.LpProblem) -> Arrays:
    """The problem as it is now."""
    variables = tuple(sorted(problem.variables(), key=lambda v: v.name))
    columns = {_key(v): i for i, v in enumerate(variables)}
    costs = np.zeros(len(variables))
    offset = 0.0
    objective = problem.objective
    if objective is not None:
        offset = float(objective.constant)
        for v, cost in objective.items():
            costs[columns[_key(v)]] = cost
    starts = [0]
    indices: list[int] = []
    coefficients: list[float] = []
    senses: list[int] = []
    rhs: list[float] = []
    for row in problem.constraints():
        entries = row.items()
        indices += [columns[_key(v)] for v, _ in entries]
        coefficients += [coefficient for _, coefficient in entries]
        starts.append(len(indices))
        senses.append(row.sense)
        rhs.append(-row.constant)
    return Arrays(
        problem=problem,
        variables=variables,
        costs=costs,
        offset=offset,
        lower=np.array([-math.inf if v.lowBound is None else v.lowBound for v in variables]),
        upper=np.array([math.inf if v.upBound is None else v.upBound for v in variables]),
        is_integer=np.array([v.cat == pulp.LpInteger for v in variables], dtype=np.bool_),
        starts=np.array(starts, dtype=np.int32),
        indices=np.array(indices, dtype=np.int32),
        coefficients=np.array(coefficients, dtype=np.float64),
        senses=np.array(senses, dtype=np.int8),
        rhs=np.array(rhs, dtype=np.float64),
    )


def solve(problem: pulp.LpProblem, solver: pulp.LpSolver) -> Ended:
    """Run a solver of PuLP's; the variables then have the values that it found, if any."""
    told: Any = problem.solve(solver)
    if IS_4:
        return Ended(_outcome_of_stats(told), told.status_str)
    outcome = {
        _PULP.LpSolutionOptimal: Outcome.OPTIMAL,
        _PULP.LpSolutionIntegerFeasible: Outcome.FEASIBLE,
        _PULP.LpSolutionInfeasible: Outcome.INFEASIBLE,
    }.get(problem.sol_status, Outcome.UNKNOWN)
    return Ended(outcome, _PULP.LpStatus[problem.status])


def shorten_objective(problem: pulp.LpProblem) -> None:
    """Write the objective so that PuLP's classes can take it.

    Most of them drop its constant, on which gap and bound depend. Those of PuLP 4 for a solver's
    own package look every variable up in the whole of it, 6 s for 8,000 variables: there a variable
    stands for it, which presolve puts back. What has values by then keeps them.
    """
    objective = problem.objective
    if objective is None or not objective.constant:
        return
    terms = dict(objective.items())
    if not IS_4:
        one = problem.add_variable("one", 1, 1)
        one.varValue = 1.0
        problem.setObjective(expression({**terms, one: objective.constant}))
        return
    cost = problem.add_variable("cost")
    cost.varValue = objective.value()
    row = ("cost", {**terms, cost: -1.0}, pulp.LpConstraintEQ, -objective.constant)
    add_rows(problem, [row])
    problem.setObjective(expression({cost: 1.0}))


def _outcome_of_stats(stats: Any) -> Outcome:
    reasons = _PULP.LpSolveStatus
    if stats.has_solution:
        # No limit but the gap's is set that could be reached.
        is_done = stats.status in (reasons.Optimal, reasons.GapLimit)
        return Outcome.OPTIMAL if is_done else Outcome.FEASIBLE
    return Outcome.INFEASIBLE if stats.status == reasons.Infeasible else Outcome.UNKNOWN
