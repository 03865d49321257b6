"""Programs as arrays, the same for HiGHS and for every version of PuLP."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pulp
import pytest
from tests.helpers.graphs import chain, uneven_layers
from tests.helpers.solvers import needs_cbc, small

from remat.graph import Graph, Operation, Value
from remat.milp import backends, slots
from remat.milp.model import MilpModel
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import (
    AT_LEAST,
    AT_MOST,
    COST_SCALE,
    EQUAL,
    Program,
    ProgramArrays,
    SolverOutcome,
)
from remat.strategies.published.checkmate import CheckmateModel

BUDGET = 2_400


def test_a_program_is_written_as_arrays() -> None:
    program = small().arrays()
    assert [x.name for x in program.columns] == ["a", "b", "c"], "sorted by name"
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
    assert list(program.row(2)) == [(0, 1), (2, -1)]
    assert program.row_activities(np.array([1.0, 2.0, 3.0])).tolist() == [3, 2, -2]
    assert not program.relaxed().is_integer.any()


@pytest.mark.parametrize(
    ("sense", "void_rhs", "false_rhs"),
    [(AT_MOST, (1.0, 2.0), (0.0,)), (EQUAL, (1.0,), (0.0, 2.0)), (AT_LEAST, (1.0, 0.0), (2.0,))],
)
def test_fixed_terms_are_moved_to_the_right_hand_side(
    sense: int, void_rhs: tuple[float, ...], false_rhs: tuple[float, ...]
) -> None:
    for wrong_rhs in false_rhs:
        program = Program()
        x = program.add_binary("x")
        program.add_terms([(2.0, x), (1.0, x), (3.0, 1), (4.0, 0)], AT_MOST, 5.0)
        assert program.rows == [({x: 3.0}, AT_MOST, 2.0)]
        for rhs in void_rhs:
            program.add_terms([(1.0, 1)], sense, rhs)
        assert len(program.rows) == 1, "a void row is left out"
        program.add_terms([(1.0, 1)], sense, wrong_rhs)
        answer = HighsSolver(gap=0.0, time_limit=10.0, threads=1).run(program.arrays())
        assert answer.outcome is SolverOutcome.INFEASIBLE, "a false row is not"


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
    program = small()
    ended = pulp_solvers.run_pulp(program.arrays(), solver())
    assert ended.outcome is SolverOutcome.OPTIMAL
    assert ended.message in ("Optimal", "GapLimit")
    assert [x.value for x in program.arrays().columns] == pytest.approx([1, 1.5, 1])
    program.add_row(dict.fromkeys(program.columns, 1.0), AT_MOST, -9.0)
    assert pulp_solvers.run_pulp(program.arrays(), solver()).outcome is SolverOutcome.INFEASIBLE


def test_pulp_starts_from_values_and_counts_the_constant() -> None:
    program = small().arrays()
    start = dict(zip(program.columns, (1.0, 1.5, 1.0), strict=True))
    problem, variables = pulp_solvers.to_pulp_problem(program, start)
    assert [v.varValue for v in variables] == [1.0, 1.5, 1.0]
    assert pulp.value(problem.objective) == 11.0


def test_highs_solves_the_program_and_its_relaxation() -> None:
    program = small().arrays()
    highs = HighsSolver(gap=0.0, time_limit=10.0, threads=1)
    answer = highs.run(program)
    assert (answer.outcome, answer.objective) == (SolverOutcome.OPTIMAL, pytest.approx(11))
    assert [x.value for x in program.columns] == pytest.approx([1, 1.5, 1])
    assert highs.run(program.relaxed()).objective == pytest.approx(10.5)


def test_a_program_without_columns_is_solved() -> None:
    """HiGHS reports it as empty and returns nothing."""
    one_operation = Graph((Operation("a", (), (0,), 2.0),), (Value("x", 8),), frozenset({0}))
    model = MilpModel(one_operation, slots.build_complete_slots(one_operation), 8)
    assert not model.program.columns
    answer = backends.run_model(model, HighsSolver(gap=0.0, time_limit=10.0, threads=1))
    assert answer.outcome is SolverOutcome.OPTIMAL
    assert answer.objective == answer.bound == COST_SCALE
    assert answer.schedule is not None
    assert answer.schedule.runs == (0,)


def digest(program: ProgramArrays) -> str:
    """Return a digest of everything that a solver reads."""
    numbers = (program.costs, program.lower, program.upper, program.coefficients, program.rhs)
    others = (program.is_integer, program.starts, program.indices, program.senses)
    parts = (*(part + 0.0 for part in numbers), *others)  # -0.0 is 0.0
    names = " ".join(x.name for x in program.columns)
    text = f"{names} {program.offset!r} {[part.tolist() for part in parts]}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_programs_stay_the_same() -> None:
    """Solvers search differently if only the order of the columns differs. A change of the
    formulation changes these digests."""
    graph = uneven_layers(6)
    offered = slots.build_idle_read_slots(
        graph, max_distance=9, stride=1, min_idle=4, group_span=50, schedules=()
    )
    programs = {
        "near slots": MilpModel(graph, offered, BUDGET).arrays,
        "complete slots": MilpModel(chain(5), slots.build_complete_slots(chain(5)), 5).arrays,
        "least peak": MilpModel(chain(5), slots.build_complete_slots(chain(5)), None).arrays,
        "published": CheckmateModel(chain(3), 5).program.arrays(),
    }
    digests = {name: digest(program) for name, program in programs.items()}
    assert digests == DIGESTS


DIGESTS = {
    "near slots": "2d8bff8f62895127",
    "complete slots": "fd1e819762cf535c",
    "least peak": "f9a55bea90977539",
    "published": "e162a2e55042da3c",
}
