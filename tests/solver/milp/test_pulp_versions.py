"""Programs are the same with every version of PuLP."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from importlib import metadata

import numpy as np
import pulp
import pytest
from tests.helpers.graphs import chain, uneven_layers
from tests.helpers.solvers import needs_cbc, small

from remat.graph import Graph, Operation, Value
from remat.milp import backends, model, slots
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program_arrays import SolverOutcome
from remat.milp.solvers.pulp_solvers import ProgramArrays
from remat.strategies.published.checkmate import CheckmateModel

BUDGET = 2_400


def test_a_problem_is_read_as_arrays() -> None:
    program = pulp_solvers.read_arrays(small())
    assert [v.name for v in program.variables] == ["a", "b", "c"], "sorted by name"
    assert program.costs.tolist() == [3, 2, 0]
    assert program.offset == 5
    assert program.lower.tolist() == [0, 0, -math.inf]
    assert program.upper.tolist() == [9, math.inf, 4]
    assert program.is_integer.tolist() == [True, False, False]
    assert program.starts.tolist() == [0, 2, 3, 5]
    assert program.indices.tolist() == [1, 0, 1, 0, 2]
    assert program.coefficients.tolist() == [1, 1, 1, 1, -1]
    assert program.senses.tolist() == [1, -1, 0]
    assert program.rhs.tolist() == [2.5, 2, 0]
    assert program.row_activities(np.array([1.0, 2.0, 3.0])).tolist() == [3, 2, -2]
    assert not program.relaxed().is_integer.any()
    assert program.integral().is_integer.all()


def test_a_bound_set_later_is_read() -> None:
    problem = small()
    program = pulp_solvers.read_arrays(problem)
    program.variables[0].lowBound = 2
    assert pulp_solvers.read_arrays(problem).lower.tolist()[0] == 2


def cbc() -> pulp.LpSolver:
    return pulp_solvers.open_solver("CBC", gap=0, time_limit=10, threads=1, warm_start=False)


@pytest.mark.parametrize(
    "solver",
    [
        # Without a number of threads: the process has one pool of HiGHS's.
        pytest.param(lambda: pulp.HiGHS(msg=False), id="HiGHS"),
        pytest.param(cbc, id="CBC", marks=needs_cbc),
    ],
)
def test_pulps_solver_classes_report_their_status(solver: Callable[[], pulp.LpSolver]) -> None:
    problem = small()
    ended = pulp_solvers.solve(problem, solver())
    assert ended.outcome is SolverOutcome.OPTIMAL
    assert ended.message in ("Optimal", "GapLimit")
    values = [v.varValue for v in pulp_solvers.read_arrays(problem).variables]
    assert values == pytest.approx([1, 1.5, 1])
    pulp_solvers.add_rows(
        problem, [("no", dict.fromkeys(problem.variables(), 1.0), pulp.LpConstraintLE, -9.0)]
    )
    assert pulp_solvers.solve(problem, solver()).outcome is SolverOutcome.INFEASIBLE


def test_highs_solves_the_program_and_its_relaxation() -> None:
    program = pulp_solvers.read_arrays(small())
    highs = HighsSolver(gap=0.0, time_limit=10.0, threads=1)
    answer = highs.solve(program)
    assert (answer.outcome, answer.objective) == (SolverOutcome.OPTIMAL, pytest.approx(11))
    assert highs.solve(program.relaxed()).objective == pytest.approx(10.5)
    assert highs.solve(program.integral()).objective == pytest.approx(12)


def test_a_program_without_columns_is_solved() -> None:
    """HiGHS reports it as empty and returns nothing."""
    one_operation = Graph((Operation("a", (), (0,), 2.0),), (Value("x", 8),), frozenset({0}))
    program = model.build(one_operation, slots.build_complete_slots(one_operation), 8)
    assert program.columns == 0
    answer = backends.run(program, gap=0.0, time_limit=10.0)
    assert answer.outcome is SolverOutcome.OPTIMAL
    assert answer.objective == answer.bound == model.COST_SCALE
    assert answer.schedule is not None
    assert answer.schedule.runs == (0,)


def digest(program: ProgramArrays) -> str:
    """Return a digest of everything that a solver reads."""
    numbers = (program.costs, program.lower, program.upper, program.coefficients, program.rhs)
    others = (program.is_integer, program.starts, program.indices, program.senses)
    parts = (*(part + 0.0 for part in numbers), *others)  # -0.0 is 0.0
    names = " ".join(v.name for v in program.variables)
    text = f"{names} {program.offset!r} {[part.tolist() for part in parts]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_every_version_of_pulp_builds_the_same_programs() -> None:
    """Solvers search differently if only the order of the columns differs. A change of the
    formulation changes these digests; a change of PuLP must not."""
    graph = uneven_layers(6)
    offered = slots.build_idle_read_slots(
        graph, max_distance=9, stride=1, min_idle=4, group_span=50, schedules=()
    )
    programs = {
        "near slots": model.build(graph, offered, BUDGET).arrays,
        "complete slots": model.build(chain(5), slots.build_complete_slots(chain(5)), 5).arrays,
        "least peak": model.build(chain(5), slots.build_complete_slots(chain(5)), None).arrays,
        "published": pulp_solvers.read_arrays(CheckmateModel(chain(3), 5).problem),
    }
    digests = {name: digest(program) for name, program in programs.items()}
    assert digests == DIGESTS, f"with PuLP {metadata.version('pulp')}"


DIGESTS = {
    "near slots": "2d8bff8f62895127",
    "complete slots": "fd1e819762cf535c",
    "least peak": "f9a55bea90977539",
    "published": "e162a2e55042da3c",
}
