"""The solvers that PuLP supports: their names in remat, and how each is set up.

A *family* is a solver as its users know it ("Gurobi"); PuLP has one class for its Python package
and one for its command. The family's name and PuLP's class names are accepted, in any case.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pulp

from remat.errors import SolverError
from remat.milp.solvers.pulp_versions import CBC_REMEDY

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
