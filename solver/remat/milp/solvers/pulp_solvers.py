"""The solvers that PuLP supports: their names in remat, how each is set up, and a program in its
form.

A *family* is a solver as its users know it ("Gurobi"); PuLP has one class for its Python package
and one for its command. The family's name and PuLP's class names are accepted, in any case.

PuLP 4 keeps a problem in a core written in Rust. A row is an expression with a sense, there is no
LpConstraint to construct; `solve` returns statistics and sets no status on the problem. It does not
bundle CBC. What both versions have is used directly. `remat.milp.solvers.probe` is a separate
script with its own few lines.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pulp

from remat.errors import SolverError
from remat.milp.solvers.program import Column, ProgramArrays, SolverOutcome

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
    """True if a solver of this name is HiGHS, the default, which runs without PuLP."""
    return name.casefold() == HIGHS.name.casefold()


def find_family(name: str) -> SolverFamily:
    """Return the family of this name, or of one of PuLP's classes. Raises `SolverError` for any
    other."""
    folded_name = name.casefold()
    for candidate in FAMILIES:
        if folded_name == candidate.name.casefold():
            return candidate
    owner = next((f for f in FAMILIES if folded_name in map(str.casefold, f.classes)), None)
    pulp_class = _pulp_classes().get(folded_name)
    if pulp_class is not None:
        remedy = "see PuLP's manual" if owner is None else owner.remedy
        return SolverFamily(pulp_class.name, (pulp_class.name,), remedy)
    if owner is not None:
        # This PuLP does not have that class: use another one of the family.
        return owner
    names = ", ".join(candidate.name for candidate in FAMILIES)
    classes = ", ".join(sorted(cls.name for cls in _pulp_classes().values()))
    raise SolverError(f"no solver is called {name!r}; use {names}. PuLP knows {classes}")


def open_solver(
    name: str, *, gap: float, time_limit: float, threads: int, warm_start: bool
) -> pulp.LpSolver:
    """Return the first solver of the family `name` that is available, with these options. Raises
    `SolverError` if none is."""
    family = find_family(name)
    classes = _pulp_classes()
    refusals: list[str] = []
    for class_name in family.classes:
        cls = classes.get(class_name.casefold())
        if cls is None:
            continue
        try:
            with warnings.catch_warnings(record=True) as caught_warnings:
                warnings.simplefilter("always")
                backend = _construct_solver(cls, gap, time_limit, threads, warm_start)
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


def _dual_bound(backend: pulp.LpSolver, problem: pulp.LpProblem) -> float | None:
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


def _pulp_classes() -> dict[str, type[pulp.LpSolver]]:
    """Return PuLP's solver classes, by their names without case."""
    return {
        cls.name.casefold(): cls
        for cls in vars(pulp).values()
        if isinstance(cls, type) and issubclass(cls, pulp.LpSolver) and cls.name[:3] != "LpS"
    }


def _construct_solver(
    cls: type[pulp.LpSolver], gap: float, time_limit: float, threads: int, warm_start: bool
) -> pulp.LpSolver:
    """Return a solver of this class with the options that it accepts, silent."""
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
    """Remove the tracebacks of failed imports, which PuLP's classes store for solvers that are not
    installed: they reference the frames of all callers, such as the function that imported remat,
    with its tensors.
    """
    for solver_class in vars(pulp).values():
        if isinstance(error := getattr(solver_class, "err", None), BaseException):
            error.__traceback__ = error.__cause__ = error.__context__ = None


_release_import_errors()


@dataclass(frozen=True, slots=True)
class PulpResult:
    """The outcome that a solver of PuLP's reports, its message, and its dual bound in units of the
    objective; None if it has none."""

    outcome: SolverOutcome
    message: str
    bound: float | None


def run_pulp(
    program: ProgramArrays, solver: pulp.LpSolver, start: Mapping[Column, float] | None = None
) -> PulpResult:
    """Run a solver of PuLP's; the columns then have the values of its solution, if any."""
    problem, variables = to_pulp_problem(program, start)
    result: Any = problem.solve(solver)
    for column, variable in zip(program.columns, variables, strict=True):
        column.value = variable.varValue
    bound = _dual_bound(solver, problem)
    if IS_PULP_4:
        return PulpResult(_outcome_of_stats(result), result.status_str, bound)
    outcome = {
        _PULP.LpSolutionOptimal: SolverOutcome.OPTIMAL,
        _PULP.LpSolutionIntegerFeasible: SolverOutcome.FEASIBLE,
        _PULP.LpSolutionInfeasible: SolverOutcome.INFEASIBLE,
    }.get(problem.sol_status, SolverOutcome.UNKNOWN)
    return PulpResult(outcome, _PULP.LpStatus[problem.status], bound)


def to_pulp_problem(
    program: ProgramArrays, start: Mapping[Column, float] | None = None
) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return a program in PuLP's form, and its variables in the order of the columns, with the
    values of `start`.

    Most of PuLP's classes drop the constant of an objective, on which gap and bound depend: it
    becomes the cost of a variable that is fixed to 1. With PuLP 4 one variable is the whole
    objective, by a row that presolve removes: its classes for a solver's own package take 6 s for
    an objective of 8,000 variables.
    """
    problem = pulp.LpProblem("rematerialization", pulp.LpMinimize)
    variables = [
        problem.add_variable(
            column.name,
            lower if math.isfinite(lower) else None,
            upper if math.isfinite(upper) else None,
            pulp.LpInteger if is_integer else pulp.LpContinuous,
        )
        for column, lower, upper, is_integer in zip(
            program.columns,
            program.lower.tolist(),
            program.upper.tolist(),
            program.is_integer.tolist(),
            strict=True,
        )
    ]
    costs = {x: cost for x, cost in zip(variables, program.costs.tolist(), strict=True) if cost}
    for row, sense in enumerate(program.senses.tolist()):
        terms = {variables[i]: coefficient for i, coefficient in program.row(row)}
        _add_pulp_row(problem, f"row{row}", terms, sense, float(program.rhs[row]))
    if start is not None:
        for column, variable in zip(program.columns, variables, strict=True):
            variable.varValue = start.get(column)
    if program.offset and IS_PULP_4:
        cost = problem.add_variable("cost")
        _add_pulp_row(problem, "cost", {**costs, cost: -1.0}, pulp.LpConstraintEQ, -program.offset)
        if start is not None:
            cost.varValue = program.offset + sum(c * (x.varValue or 0.0) for x, c in costs.items())
        costs = {cost: 1.0}
    elif program.offset:
        constant_one = problem.add_variable("one", 1, 1)
        constant_one.varValue = 1.0
        costs[constant_one] = program.offset
    problem.setObjective(_pulp_expression(costs))
    return problem, variables


def _pulp_expression(terms: Mapping[pulp.LpVariable, float], constant: float = 0.0) -> Any:
    """Return a sum of terms and a constant as PuLP's expression."""
    if IS_PULP_4:
        return _PULP.LpAffineExpression.from_dict(terms, constant)
    return pulp.LpAffineExpression(terms, constant=constant)


def _add_pulp_row(
    problem: pulp.LpProblem, name: str, terms: dict[pulp.LpVariable, float], sense: int, rhs: float
) -> None:
    """Add a row to PuLP's problem: the sum of terms (sense) rhs."""
    if IS_PULP_4:
        row = _pulp_expression(terms, -rhs)
        row.sense = sense
        problem.addConstraint(row, name)
    else:
        problem.addConstraint(pulp.LpConstraint(_pulp_expression(terms), sense, rhs=rhs), name)


def _outcome_of_stats(stats: Any) -> SolverOutcome:
    """Return the outcome that the statistics of PuLP 4 report."""
    reasons = _PULP.LpSolveStatus
    if stats.has_solution:
        # No limit other than the gap's is set that could be reached.
        is_optimal = stats.status in (reasons.Optimal, reasons.GapLimit)
        return SolverOutcome.OPTIMAL if is_optimal else SolverOutcome.FEASIBLE
    return SolverOutcome.INFEASIBLE if stats.status == reasons.Infeasible else SolverOutcome.UNKNOWN
