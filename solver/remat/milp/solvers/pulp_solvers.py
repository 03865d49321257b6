"""The solvers that PuLP can call: what they are called here, and how each is set up.

A *family* is a solver as its users know it ("Gurobi"); PuLP has one class for its Python package
and one for its command. Either the family's name or PuLP's class name will do, in any case.
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

LEAST_GAP = 1e-9
"""Asked for instead of 0, which some of PuLP's classes take for the solver's default (1e-4)."""

DEFAULT = 'use solver="HiGHS", which comes with remat'


@dataclass(frozen=True, slots=True)
class Family:
    """A solver, PuLP's classes for it (the best first), and how to get it."""

    name: str
    classes: tuple[str, ...]
    remedy: str


HIGHS = Family("HiGHS", ("HiGHS",), "pip install highspy")
FAMILIES = (
    HIGHS,
    Family("CBC", ("PULP_CBC_CMD", "COIN_CMD"), CBC_REMEDY),
    Family("Gurobi", ("GUROBI", "GUROBI_CMD"), "pip install gurobipy, and a licence"),
    Family("CPLEX", ("CPLEX_PY", "CPLEX_CMD"), "pip install cplex, and a licence"),
    Family("SCIP", ("SCIP_PY", "SCIP_CMD"), "pip install pyscipopt"),
    Family("COPT", ("COPT", "COPT_CMD"), "pip install coptpy, and a licence"),
    Family("Xpress", ("XPRESS_PY", "XPRESS"), "pip install xpress, and a licence"),
    Family("cuOpt", ("CUOPT",), "install NVIDIA cuOpt, which needs a GPU"),
)

_BOUNDS: dict[str, Callable[[Any], float]] = {
    "GUROBI": lambda model: model.ObjBound,
    "CPLEX_PY": lambda model: model.solution.MIP.get_best_objective(),
    "SCIP_PY": lambda model: model.getDualbound(),
    "COPT": lambda model: model.getAttr("BestBnd"),
    "XPRESS_PY": lambda model: model.attributes.bestbound,
}
"""Where the solver keeps its dual bound, by PuLP's class name; PuLP passes none on."""


def is_highs(name: str) -> bool:
    """Whether this is the default solver, which does not go through PuLP's class."""
    return name.casefold() == HIGHS.name.casefold()


def family(name: str) -> Family:
    """By its name or by that of one of PuLP's classes. Raises `SolverError` for any other."""
    wanted = name.casefold()
    for known in FAMILIES:
        if wanted == known.name.casefold():
            return known
    owner = next((f for f in FAMILIES if wanted in map(str.casefold, f.classes)), None)
    found = _classes().get(wanted)
    if found is not None:
        remedy = "see PuLP's manual" if owner is None else owner.remedy
        return Family(found.name, (found.name,), remedy)
    if owner is not None:
        # A class that this PuLP has not: another one of the family will do.
        return owner
    names = ", ".join(known.name for known in FAMILIES)
    classes = ", ".join(sorted(cls.name for cls in _classes().values()))
    raise SolverError(f"no solver is called {name!r}; use {names}. PuLP knows {classes}")


def open_solver(
    name: str, *, gap: float, time_limit: float, threads: int, warm_start: bool
) -> pulp.LpSolver:
    """The family's first available solver, set up. Raises `SolverError` if there is none."""
    wanted = family(name)
    classes = _classes()
    refusals: list[str] = []
    for class_name in wanted.classes:
        cls = classes.get(class_name.casefold())
        if cls is None:
            continue
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                backend = _construct(cls, gap, time_limit, threads, warm_start)
                available = backend.available()
        except Exception as error:
            refusals.append(f"{class_name}: {error}")
            continue
        if available:
            return backend
        refusals += [
            f"{class_name}: {one.message}"
            for one in said
            if not issubclass(one.category, DeprecationWarning)
        ]
    why = f" ({'; '.join(refusals)})" if refusals else ""
    raise SolverError(f"{wanted.name} is not available here{why}: {wanted.remedy}; or {DEFAULT}")


def require(name: str) -> None:
    """Raise `SolverError` at once if a solver is missing, not when a program first needs it."""
    if not is_highs(name):
        open_solver(name, gap=0.0, time_limit=1.0, threads=1, warm_start=False)


def bound(backend: pulp.LpSolver, problem: pulp.LpProblem) -> float | None:
    """The dual bound after a solve, in units of the objective; None if the solver tells none."""
    read = _BOUNDS.get(backend.name)
    if read is None:
        return None
    try:
        number = float(read(problem.solverModel))
    except Exception:
        # A bound is a bonus; each package has errors of its own for having none.
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
    gap = max(gap, LEAST_GAP)
    options: dict[str, Any] = {
        "timeLimit": time_limit,
        "gapRel": gap,
        "threads": threads,
        "warmStart": warm_start,
    }
    accepted = inspect.signature(cls.__init__).parameters
    options = {key: value for key, value in options.items() if key in accepted}
    if cls.name == "GUROBI":
        # An environment of its own: silent from the start, its licence given back at the end.
        options |= {"manageEnv": True, "Threads": threads}
    elif cls.name == "COPT":
        options |= {"Threads": threads}
    elif cls.name == "COPT_CMD":
        options |= {"Threads": threads, "TimeLimit": time_limit, "RelGap": gap}
    elif cls.name in ("XPRESS", "XPRESS_PY"):
        # Whole seconds; 0 is no limit.
        options |= {"timeLimit": math.ceil(time_limit), "options": [f"THREADS={threads}"]}
    elif cls.name in ("SCIP_CMD", "SCIP_PY"):
        options.pop("threads", None)
    return cls(msg=False, **options)
