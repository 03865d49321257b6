"""Programs that are written without PuLP are the same arrays."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pulp

from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program_arrays import ArrayProgram, Column, ProgramArrays


def columns_of(program: ArrayProgram) -> tuple[Column, Column, Column]:
    return (
        program.add_column("x", 0, 1, is_integer=True),
        program.add_column("wait", 0),
        program.add_column("a", 1, 1),
    )


def written_directly() -> tuple[ArrayProgram, tuple[Column, Column, Column]]:
    program = ArrayProgram()
    x, wait, a = columns_of(program)
    program.add_row({x: 2.0, wait: 1.0}, 1.5)
    program.add_row({a: -1.0, x: -1.0}, -1.0)
    program.costs, program.offset = {wait: 3.0, x: 1.0}, 10.0
    return program, (x, wait, a)


def written_with_pulp() -> ProgramArrays:
    problem = pulp.LpProblem("same", pulp.LpMinimize)
    x = problem.add_variable("x", 0, 1, "Integer")
    wait = problem.add_variable("wait", 0)
    a = problem.add_variable("a", 1, 1)
    problem.setObjective(pulp_solvers.expression({wait: 3.0, x: 1.0}, 10.0))
    rows = [
        ("first", {x: 2.0, wait: 1.0}, pulp.LpConstraintGE, 1.5),
        ("second", {a: -1.0, x: -1.0}, pulp.LpConstraintGE, -1.0),
    ]
    pulp_solvers.add_rows(problem, rows)
    return pulp_solvers.read_arrays(problem)


def test_arrays_are_those_of_pulp() -> None:
    arrays, others = written_directly()[0].arrays(), written_with_pulp()
    assert [v.name for v in arrays.variables] == [v.name for v in others.variables]
    for field in fields(ProgramArrays):
        if field.name not in ("variables", "problem"):
            actual, expected = getattr(arrays, field.name), getattr(others, field.name)
            assert np.array_equal(actual, expected), field.name


def test_columns_have_the_values_of_the_solution() -> None:
    program, (x, wait, a) = written_directly()
    run = HighsSolver(gap=0.0, time_limit=10.0, threads=1).solve(program.arrays())
    assert run.objective is not None
    assert math.isclose(run.objective, 14.5)
    assert [column.varValue for column in (x, wait, a)] == [0.0, 1.5, 1.0]
