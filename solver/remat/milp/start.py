"""A schedule as values of a program's variables: for a solver to start from, or to doubt it by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pulp

from remat.milp.model import Model
from remat.schedule import Schedule

_TOLERANCE = 1e-6
_WHOLE = 1e-4
"""How far from an integer a solver may leave an integer variable; their defaults are up to 1e-5."""

Values = dict[pulp.LpVariable, float]


def start_values(model: Model, schedule: Schedule) -> Values | None:
    """Values of all variables but the budget's; None if the slots cannot express the schedule.

    A value is held for as long as a run that follows reads it, and no longer: backwards from the
    end, each row that asks for a value to be held earlier is met by holding it.
    """
    used = model.slots.locate(schedule)
    if used is None:
        return None
    chosen = set(used)
    program = model.arrays
    columns = {v: i for i, v in enumerate(program.variables)}
    found: dict[int, float] = {
        i: float(program.lower[i]) for i in np.flatnonzero(program.upper == 1).tolist()
    }
    runs = {columns[run]: float(slot in chosen) for slot, run in model.runs.items()}
    found |= runs
    starts = program.starts.tolist()
    indices, shares = program.indices.tolist(), program.coefficients.tolist()
    senses, rhs = program.senses.tolist(), program.rhs.tolist()

    def row(number: int) -> tuple[Sequence[int], Sequence[float]]:
        entries = slice(starts[number], starts[number + 1])
        return indices[entries], shares[entries]

    for number in reversed(range(len(rhs))):
        held, parts = row(number)
        if not all(i in found for i in held):
            continue
        level = -rhs[number] + sum(found[i] * part for i, part in zip(held, parts, strict=True))
        if _excess(level, senses[number]) > _TOLERANCE:
            found |= {
                i: 1.0 for i, part in zip(held, parts, strict=True) if part < 0 and i not in runs
            }
    for number, sense in enumerate(senses):
        if sense == pulp.LpConstraintEQ:
            # A balance: the one variable not known yet is the sum of the others.
            held, parts = row(number)
            total = next(i for i in held if i not in found)
            known = (found[i] * part for i, part in zip(held, parts, strict=True) if i != total)
            found[total] = -rhs[number] + sum(known)
    return {program.variables[i]: value for i, value in found.items()}


def is_solution(model: Model, values: Values, tolerance: float = _TOLERANCE) -> bool:
    """Whether the values meet every row, all bounds and integrality, `tolerance` being relative to
    right-hand sides. What concerns variables without a value is passed over."""
    program = model.arrays
    known = np.array([values.get(v, np.nan) for v in program.variables])
    lowest, highest = program.lower - tolerance, program.upper + tolerance
    whole = np.where(program.is_integer, np.rint(known), known)
    levels = program.row_levels(known) - program.rhs
    excess = np.where(
        program.senses == pulp.LpConstraintEQ, np.abs(levels), -levels * program.senses
    )
    broken = (
        (known < lowest).any()
        or (known > highest).any()
        or (np.abs(whole - known) > _WHOLE).any()
        or (excess > tolerance * np.maximum(1.0, np.abs(program.rhs))).any()
    )
    return not broken


def _excess(level: float, sense: int) -> float:
    """By how much a row is broken."""
    return abs(level) if sense == pulp.LpConstraintEQ else -level * sense
