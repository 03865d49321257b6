"""Run a model on a solver and say honestly what came of it.

HiGHS is the default and the only one that reports progress. Any other solver that PuLP knows goes
by the name of its family or of PuLP's class: see `solvers.pulp_solvers`. Of those, the ones that
run as a command can be cancelled on Linux: see `solvers.commands`.

PuLP's classes are taken at their word only where it can be true. Some call every solution optimal,
some report a time limit, a refused licence or a program of theirs that never ran as "infeasible".
So a claim to have finished does not count once the time is up, and a claim that there is no
solution not where one is known.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from tempfile import TemporaryDirectory

import pulp

from remat.errors import SolverError
from remat.milp.model import Model
from remat.milp.solvers import pulp_solvers, pulp_versions
from remat.milp.solvers.commands import ended_once
from remat.milp.solvers.highs import EXACT, BulkHiGHS, Report
from remat.milp.solvers.outcome import Outcome, SolverRun
from remat.milp.start import Values, is_solution, start_values
from remat.schedule import Schedule

_TIME_IS_UP = 0.98
"""A run that took this share of its time limit may have been stopped by it."""

_CLOSE = 1e-4
"""By how much of it a solver may miss a right-hand side: what it says is simulated anyway."""


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
    exact: bool = False,
    report: Report | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> SolverRun:
    """Solve `model` to `gap` (relative) within `time_limit` seconds.

    `incumbent` is used where the slots can express it; `target` ends the solve at the first
    solution that good; `exact` asks for the smallest tolerances of rows (HiGHS only, as are `seed`
    and `report`). Once `cancelled`, the best solution so far is the answer. Raises `SolverError` if
    the solver is missing, unlicensed or fails.
    """
    start = None if incumbent is None else start_values(model, incumbent)
    if not pulp_solvers.is_highs(solver):
        return _run_pulp(model, solver, gap, time_limit, threads, start, cancelled)
    highs = BulkHiGHS(
        gap=gap,
        time_limit=time_limit,
        threads=threads,
        seed=seed,
        start=start,
        target=target,
        report=report,
        cancelled=cancelled,
        options=EXACT if exact else None,
    )
    answer = highs.solve(model.arrays)
    return answer if answer.objective is None else replace(answer, schedule=_schedule(model))


def _run_pulp(
    model: Model,
    name: str,
    gap: float,
    time_limit: float,
    threads: int,
    start: Values | None,
    cancelled: Callable[[], bool] | None,
) -> SolverRun:
    began = time.monotonic()
    backend = pulp_solvers.open_solver(
        name, gap=gap, time_limit=time_limit, threads=threads, warm_start=start is not None
    )
    for variable, value in (start or {}).items():
        variable.varValue = value
    pulp_versions.shorten_objective(model.problem)
    try:
        with _own_folder(backend), ended_once(cancelled), warnings.catch_warnings():
            # PuLP's own deprecations, and its remarks on options that a solver has not.
            warnings.simplefilter("ignore")
            ended = pulp_versions.solve(model.problem, backend)
        bound = pulp_solvers.bound(backend, model.problem)
    except Exception as error:
        # Each package has errors of its own, and a command that dies may leave half an answer.
        if cancelled is not None and cancelled():
            seconds = time.monotonic() - began
            return SolverRun(Outcome.UNKNOWN, None, None, None, 0, seconds, "cancelled")
        raise SolverError(
            f"{name} ({backend.name}) stopped without an answer: {_words(error, backend)}. Check "
            f"its installation, and that its licence allows {model.columns:,} variables and "
            f"{model.rows:,} rows; or {pulp_solvers.DEFAULT}"
        ) from error
    finally:
        with suppress(Exception):  # as where the licence that it gives back is lost
            getattr(backend, "close", lambda: None)()
    seconds = time.monotonic() - began
    outcome = ended.outcome
    is_cut_short = cancelled is not None and cancelled()
    if is_cut_short and outcome is not Outcome.FEASIBLE:
        outcome = Outcome.UNKNOWN
    if outcome is Outcome.INFEASIBLE and start is not None and is_solution(model, start):
        raise SolverError(
            f"{name} ({backend.name}) says that there is no solution, but one is known: "
            f"check its licence and installation, or {pulp_solvers.DEFAULT}"
        )
    if outcome is not Outcome.FEASIBLE and (
        outcome is Outcome.UNKNOWN or seconds > _TIME_IS_UP * time_limit
    ):
        outcome = Outcome.FEASIBLE if _is_solved(model) else Outcome.UNKNOWN
    objective = None
    if outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE):
        objective = _objective(model)
    if bound is None and outcome is Outcome.OPTIMAL and objective is not None:
        # That the solver stopped within the gap proves this one.
        bound = objective - max(gap, pulp_solvers.LEAST_GAP) * abs(objective)
    if bound is not None and objective is not None:
        bound = min(bound, objective)
    return SolverRun(
        outcome=outcome,
        schedule=_schedule(model) if objective is not None else None,
        objective=objective,
        bound=bound,
        nodes=0,
        seconds=seconds,
        message=ended.message,
    )


@contextmanager
def _own_folder(backend: pulp.LpSolver) -> Iterator[None]:
    """A folder for the files by which PuLP speaks to a command: it leaves those of one that dies
    behind."""
    if not isinstance(backend, pulp.LpSolver_CMD):
        yield
        return
    with TemporaryDirectory(prefix="remat-", dir=backend.tmpDir or None) as folder:
        backend.tmpDir = folder
        yield


def _words(error: Exception, backend: pulp.LpSolver) -> str:
    if isinstance(error, pulp.PulpSolverError) and isinstance(backend, pulp.LpSolver_CMD):
        return "its command failed or was killed"  # PuLP only tells where it lies
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_solved(model: Model) -> bool:
    """Whether the variables have values that are a solution."""
    program = model.arrays
    found = [v.varValue for v in program.variables]
    if any(found[column] is None for column in set(program.indices.tolist())):
        return False
    values = zip(program.variables, found, strict=True)
    known = {v: float(value) for v, value in values if value is not None}
    return is_solution(model, known, _CLOSE)


def _objective(model: Model) -> float:
    value = pulp.value(model.problem.objective)
    if not isinstance(value, float | int):
        raise SolverError("the solver claims a solution but returned no values")
    return float(value)


def _schedule(model: Model) -> Schedule:
    return model.slots.schedule(
        slot for slot, run in model.runs.items() if (run.varValue or 0.0) > 0.5
    )
