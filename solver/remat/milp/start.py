"""A schedule as values of a program's variables: for a solver to start from, or to doubt it by."""

from __future__ import annotations

import pulp

from remat.milp.model import Model
from remat.schedule import Schedule

_TOLERANCE = 1e-6
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
    variables = model.problem.variables()
    rows = list(model.problem.constraints())
    found: Values = {v: float(v.lowBound or 0) for v in variables if v.upBound == 1}
    found |= {run: float(slot in chosen) for slot, run in model.runs.items()}
    runs = set(model.runs.values())
    for row in reversed(rows):
        if all(v in found for v in row) and _excess(row, found) > _TOLERANCE:
            found |= {v: 1.0 for v, share in row.items() if share < 0 and v not in runs}
    for row in rows:
        if row.sense == pulp.LpConstraintEQ:
            # A balance: the one variable not known yet is the sum of the others.
            total = next(v for v in row if v not in found)
            known = sum(found[v] * share for v, share in row.items() if v is not total)
            found[total] = row.constant + known
    return found


def is_solution(model: Model, values: Values) -> bool:
    """Whether the values meet every row; rows of variables without a value are passed over."""
    rows = (row for row in model.problem.constraints() if all(v in values for v in row))
    return all(_excess(row, values) <= _TOLERANCE * max(1.0, abs(row.constant)) for row in rows)


def _excess(row: pulp.LpConstraint, values: Values) -> float:
    """By how much a row is broken."""
    level = row.constant + sum(values[v] * share for v, share in row.items())
    if row.sense == pulp.LpConstraintEQ:
        return abs(level)
    return -level * row.sense
