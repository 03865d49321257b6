"""Differences between PuLP 3.3 and PuLP 4, so that no other module has to know them.

PuLP 4 keeps a problem in a core written in Rust. Variables and rows are views on it, created at
each access: they are equal by their number, and accessing each of them takes time, so a program is
read once, as arrays (`read_arrays`). A row is an expression with a sense, there is no LpConstraint
to construct; a missing bound is an infinity; `solve` returns statistics and sets no status on the
problem; columns are in the order of their creation, no longer in that of their names. It does not
bundle CBC.

What both have is used directly: `LpProblem.add_variable`, `.variables()`, `.setObjective`, the
attributes of variables. `remat.milp.solvers.probe` is a separate script with its own few lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pulp

from remat.milp.solvers.outcome import SolverOutcome
from remat.milp.solvers.program_arrays import ProgramArrays

IS_PULP_4 = hasattr(pulp, "LpSolveStats")

CBC_REMEDY = (
    "pip install 'remat[cbc]'" if IS_PULP_4 else "install a PuLP that bundles CBC, or `cbc`"
)
"""How to install CBC: PuLP 3.3 bundles it for most machines."""

_PULP: Any = pulp
"""PuLP without types, for names that only one of the versions has."""


def _release_import_errors() -> None:
    """Remove the tracebacks that PuLP's classes store of solvers that are not installed.

    Their frames reference those of all callers: the function that imported remat, with its tensors.
    """
    for solver_class in vars(pulp).values():
        if isinstance(error := getattr(solver_class, "err", None), BaseException):
            error.__traceback__ = error.__cause__ = error.__context__ = None


_release_import_errors()

_variable_key: Callable[[Any], int] = attrgetter("id") if IS_PULP_4 else id
"""Key that is equal for the same variable of one problem. Hashing the variable itself is slower."""


@dataclass(frozen=True, slots=True)
class PulpResult:
    """The outcome that a solver of PuLP's reports, and its message."""

    outcome: SolverOutcome
    message: str


def expression(
    terms: Mapping[pulp.LpVariable, float], constant: float = 0.0
) -> pulp.LpAffineExpression:
    """Return the sum of the terms and the constant."""
    if IS_PULP_4:
        return _PULP.LpAffineExpression.from_dict(terms, constant)
    return pulp.LpAffineExpression(terms, constant=constant)


def add_rows(
    problem: pulp.LpProblem,
    rows: Iterable[tuple[str, Mapping[pulp.LpVariable, float], int, float]],
) -> None:
    """Add rows to a problem: (name, terms, sense, right-hand side), with distinct names."""
    if IS_PULP_4:
        for name, terms, sense, rhs in rows:
            row: Any = expression(terms, -rhs)
            row.sense = sense
            problem.addConstraint(row, name)
    else:
        problem.extend(
            (name, pulp.LpConstraint(expression(terms), sense, rhs=rhs))
            for name, terms, sense, rhs in rows
        )


def read_arrays(problem: pulp.LpProblem) -> ProgramArrays:
    """Return the problem in its present state as arrays."""
    variables = tuple(sorted(problem.variables(), key=lambda v: v.name))
    columns = {_variable_key(v): i for i, v in enumerate(variables)}
    costs = np.zeros(len(variables))
    offset = 0.0
    objective = problem.objective
    if objective is not None:
        offset = float(objective.constant)
        for v, cost in objective.items():
            costs[columns[_variable_key(v)]] = cost
    starts = [0]
    indices: list[int] = []
    coefficients: list[float] = []
    senses: list[int] = []
    rhs: list[float] = []
    for row in problem.constraints():
        entries = row.items()
        indices += [columns[_variable_key(v)] for v, _ in entries]
        coefficients += [coefficient for _, coefficient in entries]
        starts.append(len(indices))
        senses.append(row.sense)
        rhs.append(-row.constant)
    return ProgramArrays(
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


def solve(problem: pulp.LpProblem, solver: pulp.LpSolver) -> PulpResult:
    """Run a solver of PuLP's; the variables then have the values of its solution, if any."""
    result: Any = problem.solve(solver)
    if IS_PULP_4:
        return PulpResult(_outcome_of_stats(result), result.status_str)
    outcome = {
        _PULP.LpSolutionOptimal: SolverOutcome.OPTIMAL,
        _PULP.LpSolutionIntegerFeasible: SolverOutcome.FEASIBLE,
        _PULP.LpSolutionInfeasible: SolverOutcome.INFEASIBLE,
    }.get(problem.sol_status, SolverOutcome.UNKNOWN)
    return PulpResult(outcome, _PULP.LpStatus[problem.status])


def shorten_objective(problem: pulp.LpProblem) -> None:
    """Rewrite the objective in a form that PuLP's classes handle.

    Most of them drop its constant, on which gap and bound depend. Those of PuLP 4 for a solver's
    own package look every variable up in all of it, 6 s for 8,000 variables: there a variable
    replaces it, which presolve substitutes again. Variables that have values keep them.
    """
    objective = problem.objective
    if objective is None or not objective.constant:
        return
    terms = dict(objective.items())
    if not IS_PULP_4:
        constant_one = problem.add_variable("one", 1, 1)
        constant_one.varValue = 1.0
        problem.setObjective(expression({**terms, constant_one: objective.constant}))
        return
    cost = problem.add_variable("cost")
    cost.varValue = objective.value()
    row = ("cost", {**terms, cost: -1.0}, pulp.LpConstraintEQ, -objective.constant)
    add_rows(problem, [row])
    problem.setObjective(expression({cost: 1.0}))


def _outcome_of_stats(stats: Any) -> SolverOutcome:
    reasons = _PULP.LpSolveStatus
    if stats.has_solution:
        # No limit other than the gap's is set that could be reached.
        is_optimal = stats.status in (reasons.Optimal, reasons.GapLimit)
        return SolverOutcome.OPTIMAL if is_optimal else SolverOutcome.FEASIBLE
    return SolverOutcome.INFEASIBLE if stats.status == reasons.Infeasible else SolverOutcome.UNKNOWN
