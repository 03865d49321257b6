"""Run a model on a solver and say honestly what came of it.

HiGHS is the default and the only one that starts from an incumbent, reports progress and can be
cancelled. Any other solver that PuLP knows goes by its PuLP name ("PULP_CBC_CMD" or "CBC",
"GUROBI", "CPLEX_PY", "SCIP_PY", ...).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import pulp

from remat.errors import SolverError
from remat.milp.highs import BulkHiGHS, Report
from remat.milp.model import Model
from remat.schedule import Schedule

_ALIASES = {"CBC": "PULP_CBC_CMD"}


class Outcome(Enum):
    """How a solver run ended."""

    OPTIMAL = "within the gap that was asked for"
    FEASIBLE = "stopped early with a solution"
    INFEASIBLE = "proved that there is no solution over these slots"
    UNKNOWN = "stopped early without a solution"


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's answer; `objective` and `bound` in the model's units, None where unknown."""

    outcome: Outcome
    schedule: Schedule | None
    objective: float | None
    bound: float | None
    nodes: int
    seconds: float
    message: str


def run(
    model: Model,
    *,
    solver: str = "HiGHS",
    gap: float,
    time_limit: float,
    threads: int = 2,
    seed: int = 0,
    incumbent: Schedule | None = None,
    target: float | None = None,
    report: Report | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Answer:
    """Solve `model` to `gap` (relative) within `time_limit` seconds.

    `incumbent` is used where the slots can express it; `target` ends the solve at the first
    solution that good. Raises `SolverError` if the solver is missing, unlicensed or fails.
    """
    if solver == "HiGHS":
        return _run_highs(
            model, gap, time_limit, threads, seed, incumbent, target, report, cancelled
        )
    return _run_pulp(model, solver, gap, time_limit, threads)


def _run_highs(
    model: Model,
    gap: float,
    time_limit: float,
    threads: int,
    seed: int,
    incumbent: Schedule | None,
    target: float | None,
    report: Report | None,
    cancelled: Callable[[], bool] | None,
) -> Answer:
    start = None
    used = model.slots.locate(incumbent) if incumbent is not None else None
    if used is not None:
        chosen = set(used)
        start = {run: float(slot in chosen) for slot, run in model.runs.items()}
    highs = BulkHiGHS(
        gap=gap,
        time_limit=time_limit,
        threads=threads,
        seed=seed,
        start=start,
        target=target,
        report=report,
        cancelled=cancelled,
    )
    model.problem.solve(highs)
    answer = highs.answer
    if answer is None:
        raise SolverError("HiGHS stopped without an answer")
    return Answer(
        outcome=_outcome(model),
        schedule=_schedule(model) if answer.objective is not None else None,
        objective=answer.objective,
        bound=answer.bound,
        nodes=answer.nodes,
        seconds=answer.seconds,
        message=answer.model_status,
    )


def _run_pulp(model: Model, name: str, gap: float, time_limit: float, threads: int) -> Answer:
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            # PuLP announces that its bundled CBC goes away in PuLP 4.
            warnings.simplefilter("ignore", DeprecationWarning)
            backend = _pulp_solver(_ALIASES.get(name, name), gap, time_limit, threads)
            model.problem.solve(backend)
    except pulp.PulpSolverError as error:
        raise SolverError(
            f'{name} failed: {error}; solver="HiGHS" needs no installation'
        ) from error
    outcome = _outcome(model)
    objective = None
    if outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE):
        objective = _objective(model)
    bound = None
    if outcome is Outcome.OPTIMAL and objective is not None:
        # PuLP passes no bound on; that the solver stopped within the gap proves this one.
        bound = objective - gap * abs(objective)
    return Answer(
        outcome=outcome,
        schedule=_schedule(model) if objective is not None else None,
        objective=objective,
        bound=bound,
        nodes=0,
        seconds=time.monotonic() - began,
        message=pulp.LpStatus[model.problem.status],
    )


def _objective(model: Model) -> float:
    value = pulp.value(model.problem.objective)
    if not isinstance(value, float | int):
        raise SolverError("the solver claims a solution but returned no values")
    return float(value)


def _pulp_solver(name: str, gap: float, time_limit: float, threads: int) -> pulp.LpSolver:
    known = pulp.listSolvers()
    if name not in known:
        raise SolverError(f"no solver is called {name!r}; PuLP knows {', '.join(known)}, CBC")
    remedy = (
        f'{name} is not available here: install it (and its licence), or use solver="HiGHS", '
        "which comes with remat"
    )
    try:
        backend = pulp.getSolver(name, msg=False, gapRel=gap, timeLimit=time_limit, threads=threads)
        available = backend.available()
    except TypeError:
        backend = pulp.getSolver(name, msg=False, timeLimit=time_limit)
        available = backend.available()
    except (pulp.PulpSolverError, ImportError, OSError) as error:
        raise SolverError(remedy) from error
    if not available:
        raise SolverError(remedy)
    return backend


def _outcome(model: Model) -> Outcome:
    status = model.problem.sol_status
    if status == pulp.LpSolutionOptimal:
        return Outcome.OPTIMAL
    if status == pulp.LpSolutionIntegerFeasible:
        return Outcome.FEASIBLE
    if status == pulp.LpSolutionInfeasible:
        return Outcome.INFEASIBLE
    return Outcome.UNKNOWN


def _schedule(model: Model) -> Schedule:
    return model.slots.schedule(
        slot for slot, run in model.runs.items() if (run.varValue or 0.0) > 0.5
    )
