"""A schedule as values of a program's variables: for a solver to start from, or to check its claims
against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pulp

from remat.milp.model import MilpModel
from remat.schedule import Schedule

_TOLERANCE = 1e-6
_INTEGER_TOLERANCE = 1e-4
"""Distance from an integer at which a solver may leave an integer variable; solvers' defaults are
up to 1e-5."""

Values = dict[pulp.LpVariable, float]


def start_values(model: MilpModel, schedule: Schedule) -> Values | None:
    """Return values of all variables but the budget's; None if the slots cannot express the
    schedule.

    A value is retained for as long as a run that follows reads it, and no longer: from the last row
    to the first, each row that is violated is satisfied by retaining its value earlier.
    """
    used = model.slots.locate(schedule)
    if used is None:
        return None
    used_slots = set(used)
    program = model.arrays
    columns = {v: i for i, v in enumerate(program.variables)}
    values: dict[int, float] = {
        i: float(program.lower[i]) for i in np.flatnonzero(program.upper == 1).tolist()
    }
    runs = {columns[run]: float(slot in used_slots) for slot, run in model.run_variables.items()}
    values |= runs
    starts = program.starts.tolist()
    indices, all_coefficients = program.indices.tolist(), program.coefficients.tolist()
    senses, rhs = program.senses.tolist(), program.rhs.tolist()

    def row(number: int) -> tuple[Sequence[int], Sequence[float]]:
        entries = slice(starts[number], starts[number + 1])
        return indices[entries], all_coefficients[entries]

    for number in reversed(range(len(rhs))):
        row_columns, coefficients = row(number)
        if not all(i in values for i in row_columns):
            continue
        activity = -rhs[number] + sum(
            values[i] * coefficient
            for i, coefficient in zip(row_columns, coefficients, strict=True)
        )
        if _violation(activity, senses[number]) > _TOLERANCE:
            values |= {
                i: 1.0
                for i, coefficient in zip(row_columns, coefficients, strict=True)
                if coefficient < 0 and i not in runs
            }
    for number, sense in enumerate(senses):
        if sense == pulp.LpConstraintEQ:
            # A balance row: the one variable without a value is the sum of the others.
            row_columns, coefficients = row(number)
            total_column = next(i for i in row_columns if i not in values)
            terms = (
                values[i] * coefficient
                for i, coefficient in zip(row_columns, coefficients, strict=True)
                if i != total_column
            )
            values[total_column] = -rhs[number] + sum(terms)
    return {program.variables[i]: value for i, value in values.items()}


def is_solution(model: MilpModel, values: Values, tolerance: float = _TOLERANCE) -> bool:
    """True if the values satisfy every row, all bounds and integrality, with a `tolerance` relative
    to right-hand sides. Rows and bounds of variables without a value are skipped."""
    program = model.arrays
    solution = np.array([values.get(v, np.nan) for v in program.variables])
    lowest, highest = program.lower - tolerance, program.upper + tolerance
    rounded = np.where(program.is_integer, np.rint(solution), solution)
    activities = program.row_activities(solution) - program.rhs
    violations = np.where(
        program.senses == pulp.LpConstraintEQ, np.abs(activities), -activities * program.senses
    )
    is_violated = (
        (solution < lowest).any()
        or (solution > highest).any()
        or (np.abs(rounded - solution) > _INTEGER_TOLERANCE).any()
        or (violations > tolerance * np.maximum(1.0, np.abs(program.rhs))).any()
    )
    return not is_violated


def _violation(activity: float, sense: int) -> float:
    """Return by how much a row is violated."""
    return abs(activity) if sense == pulp.LpConstraintEQ else -activity * sense
