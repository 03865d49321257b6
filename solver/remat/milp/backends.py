"""Run a program on a solver, and report an outcome that can be relied on.

HiGHS is the default and the only solver that reports progress. Any other solver that PuLP supports
goes by the name of its family or of PuLP's class: see `solvers.pulp_solvers`. Those that run as a
command can be cancelled on Linux: see `solvers.solver_processes`.

PuLP's classes are not always right about the outcome. Some call every solution optimal; some report
a time limit, a refused licence or a command that never ran as "infeasible". So a claim to have
finished is ignored once the time is up, and a claim that there is no solution where one is known.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pulp

from remat.errors import SolverError
from remat.milp.model import MilpModel
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import EQUAL, Column, SolverOutcome, SolverRun, value_of
from remat.milp.solvers.solver_processes import interrupt_commands_when
from remat.schedule import Schedule

_TIMEOUT_SHARE = 0.98
"""A run that took this share of its time limit may have been stopped by it."""

_ROW_TOLERANCE = 1e-4
"""Relative error of a right-hand side that is accepted from a solver: schedules are simulated
anyway."""

_TOLERANCE = 1e-6
_INTEGER_TOLERANCE = 1e-4
"""Distance from an integer at which a solver may leave an integer variable; solvers' defaults are
up to 1e-5."""

Values = dict[Column, float]


def run_model(
    model: MilpModel,
    highs: HighsSolver,
    *,
    solver: str = "HiGHS",
    incumbent: Schedule | None = None,
) -> SolverRun:
    """Solve `model` with the options of `highs`, of which other solvers have the gap, the time
    limit, the threads and the cancellation.

    The solver starts from `incumbent` if the slots can express it. Once cancelled, the best
    solution so far is returned. Raises `SolverError` if the solver is missing, unlicensed or fails.
    """
    start = None if incumbent is None else start_values(model, incumbent)
    if not pulp_solvers.is_highs(solver):
        return _run_through_pulp(model, solver, highs, start)
    answer = replace(highs, start=start).run(model.arrays)
    return (
        answer if answer.objective is None else replace(answer, schedule=_solution_schedule(model))
    )


def _run_through_pulp(
    model: MilpModel, name: str, options: HighsSolver, start: Values | None
) -> SolverRun:
    """Solve the model with a solver of PuLP's, by its name, and correct the outcome that it claims:
    see the module. Raises `SolverError` if the solver fails."""
    gap, time_limit, is_cancelled = options.gap, options.time_limit, options.is_cancelled
    started_at = time.monotonic()
    backend = pulp_solvers.open_solver(
        name,
        gap=gap,
        time_limit=time_limit,
        threads=options.threads,
        warm_start=start is not None,
    )
    try:
        with (
            _command_folder(backend),
            interrupt_commands_when(is_cancelled),
            warnings.catch_warnings(),
        ):
            # PuLP's own deprecations, and its warnings about options that a solver does not have.
            warnings.simplefilter("ignore")
            result = pulp_solvers.run_pulp(model.arrays, backend, start)
    except Exception as error:
        # Each package has its own errors, and a command that dies may leave half an answer.
        if is_cancelled is not None and is_cancelled():
            seconds = time.monotonic() - started_at
            return SolverRun(SolverOutcome.UNKNOWN, None, None, None, 0, seconds, "cancelled")
        raise SolverError(
            f"{name} ({backend.name}) stopped without an answer: "
            f"{_solver_error_text(error, backend)}. Check its installation, and that its licence "
            f"allows {len(model.program.columns):,} variables and {len(model.program.rows):,} "
            f"rows; or {pulp_solvers.DEFAULT}"
        ) from error
    finally:
        with suppress(Exception):  # for example if the licence that it returns is lost
            getattr(backend, "close", lambda: None)()
    seconds = time.monotonic() - started_at
    outcome, bound = result.outcome, result.bound
    was_cancelled = is_cancelled is not None and is_cancelled()
    if was_cancelled and outcome is not SolverOutcome.FEASIBLE:
        outcome = SolverOutcome.UNKNOWN
    if outcome is SolverOutcome.INFEASIBLE and start is not None and is_solution(model, start):
        raise SolverError(
            f"{name} ({backend.name}) reports no solution, but one is known: "
            f"check its licence and installation, or {pulp_solvers.DEFAULT}"
        )
    if outcome is not SolverOutcome.FEASIBLE and (
        outcome is SolverOutcome.UNKNOWN or seconds > _TIMEOUT_SHARE * time_limit
    ):
        outcome = SolverOutcome.FEASIBLE if _has_solution(model) else SolverOutcome.UNKNOWN
    objective = None
    if outcome in (SolverOutcome.OPTIMAL, SolverOutcome.FEASIBLE):
        objective = _objective_value(model)
    if bound is None and outcome is SolverOutcome.OPTIMAL and objective is not None:
        # The solver stopped within the gap, which proves this bound.
        bound = objective - max(gap, pulp_solvers.MIN_GAP) * abs(objective)
    if bound is not None and objective is not None:
        bound = min(bound, objective)
    return SolverRun(
        outcome=outcome,
        schedule=_solution_schedule(model) if objective is not None else None,
        objective=objective,
        bound=bound,
        nodes=0,
        seconds=seconds,
        message=result.message,
    )


@contextmanager
def _command_folder(backend: pulp.LpSolver) -> Iterator[None]:
    """Provide a folder for the files that PuLP exchanges with a command, and delete it at the end:
    PuLP leaves the files of a command that dies. Does nothing for a solver without a command."""
    if not isinstance(backend, pulp.LpSolver_CMD):
        yield
        return
    with TemporaryDirectory(prefix="remat-", dir=backend.tmpDir or None) as folder:
        backend.tmpDir = folder
        yield


def _solver_error_text(error: Exception, backend: pulp.LpSolver) -> str:
    """Return text for messages that says how a solver failed."""
    if isinstance(error, pulp.PulpSolverError) and isinstance(backend, pulp.LpSolver_CMD):
        return "its command failed or was killed"  # PuLP's message has only its path
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _has_solution(model: MilpModel) -> bool:
    """True if the values that the solver gave to the columns are a solution."""
    columns = model.arrays.columns
    if any(columns[i].value is None for i in set(model.arrays.indices.tolist())):
        return False
    values = {column: column.value for column in columns if column.value is not None}
    return is_solution(model, values, _ROW_TOLERANCE)


def _objective_value(model: MilpModel) -> float:
    """Return the objective of the solution. Raises `SolverError` if columns have no values."""
    program = model.program
    if any(column.value is None for column in program.costs):
        raise SolverError("the solver claims a solution but returned no values")
    return program.offset + sum(cost * value_of(x) for x, cost in program.costs.items())


def _solution_schedule(model: MilpModel) -> Schedule:
    """Return the schedule of the slots whose variables are 1 in the solution."""
    return model.slots.schedule(slot for slot, run in model.run_columns.items() if run.is_one)


def start_values(model: MilpModel, schedule: Schedule) -> Values | None:
    """Return values of all columns but the budget's; None if the slots cannot express the schedule.

    A value is retained for as long as a run that follows reads it, and no longer: from the last row
    to the first, each row that is violated is satisfied by retaining its value earlier.
    """
    used = model.slots.locate(schedule)
    if used is None:
        return None
    used_slots = set(used)
    values = {x: float(x.lower) for x in model.arrays.columns if x.upper == 1}
    runs = {run: float(slot in used_slots) for slot, run in model.run_columns.items()}
    values |= runs
    rows = model.program.rows
    for terms, sense, rhs in reversed(rows):
        if not all(x in values for x in terms):
            continue
        activity = sum(values[x] * coefficient for x, coefficient in terms.items()) - rhs
        if (abs(activity) if sense == EQUAL else -activity * sense) > _TOLERANCE:
            values |= {
                x: 1.0 for x, coefficient in terms.items() if coefficient < 0 and x not in runs
            }
    for terms, sense, rhs in rows:
        if sense == EQUAL:  # a balance row: the one column without a value is the sum of the others
            total = next(x for x in terms if x not in values)
            others = (values[x] * coefficient for x, coefficient in terms.items() if x is not total)
            values[total] = sum(others) - rhs
    return values


def is_solution(model: MilpModel, values: Values, tolerance: float = _TOLERANCE) -> bool:
    """True if the values satisfy every row, all bounds and integrality, with a `tolerance` relative
    to right-hand sides. Rows and bounds of columns without a value are skipped."""
    program = model.arrays
    solution = np.array([values.get(x, np.nan) for x in program.columns])
    lowest, highest = program.lower - tolerance, program.upper + tolerance
    rounded = np.where(program.is_integer, np.rint(solution), solution)
    activities = program.row_activities(solution) - program.rhs
    violations = np.where(program.senses == EQUAL, np.abs(activities), -activities * program.senses)
    is_violated = (
        (solution < lowest).any()
        or (solution > highest).any()
        or (np.abs(rounded - solution) > _INTEGER_TOLERANCE).any()
        or (violations > tolerance * np.maximum(1.0, np.abs(program.rhs))).any()
    )
    return not is_violated
