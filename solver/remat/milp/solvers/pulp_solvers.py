"""The solvers that PuLP supports: their names in remat, and how each is set up.

A *family* is a solver as its users know it ("Gurobi"); PuLP has one class for its Python package
and one for its command. The family's name and PuLP's class names are accepted, in any case.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pulp

from remat.errors import SolverError
from remat.milp.solvers.program_arrays import ProgramArrays, SolverOutcome

IS_PULP_4 = hasattr(pulp, "LpSolveStats")

CBC_REMEDY = (
    "pip install 'remat[cbc]'" if IS_PULP_4 else "install a PuLP that bundles CBC, or `cbc`"
)
"""How to install CBC: PuLP 3.3 bundles it for most machines."""

MIN_GAP = 1e-9
"""Gap to ask for instead of 0, which some of PuLP's classes take for the solver's default (1e-4).
"""

DEFAULT = 'use solver="HiGHS", which comes with remat'


@dataclass(frozen=True, slots=True)
class SolverFamily:
    """A solver, PuLP's classes for it (the best first), and how to install it."""

    name: str
    classes: tuple[str, ...]
    remedy: str


HIGHS = SolverFamily("HiGHS", ("HiGHS",), "pip install highspy")
FAMILIES = (
    HIGHS,
    SolverFamily("CBC", ("PULP_CBC_CMD", "COIN_CMD"), CBC_REMEDY),
    SolverFamily("Gurobi", ("GUROBI", "GUROBI_CMD"), "pip install gurobipy, and a licence"),
    SolverFamily("CPLEX", ("CPLEX_PY", "CPLEX_CMD"), "pip install cplex, and a licence"),
    SolverFamily("SCIP", ("SCIP_PY", "SCIP_CMD"), "pip install pyscipopt"),
    SolverFamily("COPT", ("COPT", "COPT_CMD"), "pip install coptpy, and a licence"),
    SolverFamily("Xpress", ("XPRESS_PY", "XPRESS"), "pip install xpress, and a licence"),
    SolverFamily("cuOpt", ("CUOPT",), "install NVIDIA cuOpt, which needs a GPU"),
)

_BOUNDS: dict[str, Callable[[Any], float]] = {
    "GUROBI": lambda model: model.ObjBound,
    "CPLEX_PY": lambda model: model.solution.MIP.get_best_objective(),
    "SCIP_PY": lambda model: model.getDualbound(),
    "COPT": lambda model: model.getAttr("BestBnd"),
    "XPRESS_PY": lambda model: model.attributes.bestbound,
}
"""Functions that read a solver's dual bound, by PuLP's class name; PuLP does not return it."""


def is_highs(name: str) -> bool:
    """True if this is the default solver, which does not go through PuLP's class."""
    return name.casefold() == HIGHS.name.casefold()


def find_family(name: str) -> SolverFamily:
    """Return the family of this name, or of one of PuLP's classes. Raises `SolverError` for any
    other."""
    folded_name = name.casefold()
    for candidate in FAMILIES:
        if folded_name == candidate.name.casefold():
            return candidate
    owner = next((f for f in FAMILIES if folded_name in map(str.casefold, f.classes)), None)
    pulp_class = _classes().get(folded_name)
    if pulp_class is not None:
        remedy = "see PuLP's manual" if owner is None else owner.remedy
        return SolverFamily(pulp_class.name, (pulp_class.name,), remedy)
    if owner is not None:
        # This PuLP does not have that class: use another one of the family.
        return owner
    names = ", ".join(candidate.name for candidate in FAMILIES)
    classes = ", ".join(sorted(cls.name for cls in _classes().values()))
    raise SolverError(f"no solver is called {name!r}; use {names}. PuLP knows {classes}")


def open_solver(
    name: str, *, gap: float, time_limit: float, threads: int, warm_start: bool
) -> pulp.LpSolver:
    """Return the family's first available solver, set up. Raises `SolverError` if there is none."""
    family = find_family(name)
    classes = _classes()
    refusals: list[str] = []
    for class_name in family.classes:
        cls = classes.get(class_name.casefold())
        if cls is None:
            continue
        try:
            with warnings.catch_warnings(record=True) as caught_warnings:
                warnings.simplefilter("always")
                backend = _construct(cls, gap, time_limit, threads, warm_start)
                available = backend.available()
        except Exception as error:
            refusals.append(f"{class_name}: {error}")
            continue
        if available:
            return backend
        refusals += [
            f"{class_name}: {warning.message}"
            for warning in caught_warnings
            if not issubclass(warning.category, DeprecationWarning)
        ]
    why = f" ({'; '.join(refusals)})" if refusals else ""
    raise SolverError(f"{family.name} is not available here{why}: {family.remedy}; or {DEFAULT}")


def require_solver(name: str) -> None:
    """Raise `SolverError` at once if a solver is missing, not only when a program first needs
    it."""
    if not is_highs(name):
        open_solver(name, gap=0.0, time_limit=1.0, threads=1, warm_start=False)


def dual_bound(backend: pulp.LpSolver, problem: pulp.LpProblem) -> float | None:
    """Return the dual bound after a solve, in units of the objective; None if the solver has
    none."""
    read_bound = _BOUNDS.get(backend.name)
    if read_bound is None:
        return None
    try:
        number = float(read_bound(problem.solverModel))
    except Exception:
        # The bound is optional, and each package raises its own errors where it has none.
        return None
    return number if math.isfinite(number) and abs(number) < 1e19 else None


def _classes() -> dict[str, type[pulp.LpSolver]]:
    return {
        cls.name.casefold(): cls
        for cls in vars(pulp).values()
        if isinstance(cls, type) and issubclass(cls, pulp.LpSolver) and cls.name[:3] != "LpS"
    }


def _construct(
    cls: type[pulp.LpSolver], gap: float, time_limit: float, threads: int, warm_start: bool
) -> pulp.LpSolver:
    gap = max(gap, MIN_GAP)
    options: dict[str, Any] = {
        "timeLimit": time_limit,
        "gapRel": gap,
        "threads": threads,
        "warmStart": warm_start,
    }
    accepted = inspect.signature(cls.__init__).parameters
    options = {key: value for key, value in options.items() if key in accepted}
    if cls.name == "GUROBI":
        # A separate environment: silent from the start, its licence returned at the end.
        options |= {"manageEnv": True, "Threads": threads}
    elif cls.name == "COPT":
        options |= {"Threads": threads}
    elif cls.name == "COPT_CMD":
        options |= {"Threads": threads, "TimeLimit": time_limit, "RelGap": gap}
    elif cls.name in ("XPRESS", "XPRESS_PY"):
        # Integer seconds; 0 means no limit.
        options |= {"timeLimit": math.ceil(time_limit), "options": [f"THREADS={threads}"]}
    elif cls.name in ("SCIP_CMD", "SCIP_PY"):
        options.pop("threads", None)
    return cls(msg=False, **options)


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
