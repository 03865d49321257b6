"""Pictures, code and comparisons of a step in pieces: the pieces of an operation share a line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.helpers.command_line import quick
from tests.helpers.training.models import language_model

import remat
from remat.compare import SPLIT_ROWS
from remat.view import annotated_code, memory_snapshot, schedule_figure, schedule_svg
from remat.view.schedule import ScheduleGrid

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=5.0)
PIECES = 8


@pytest.fixture(scope="module")
def module() -> remat.RematModule:
    case = language_model()
    options = {"costs": COSTS, "strategy": STRATEGY, "split": PIECES}
    return remat.optimize(case.model, "45%", case.args, **options)


@pytest.fixture(scope="module")
def plan(module: remat.RematModule) -> remat.Plan:
    assert module.plan is not None
    return module.plan


@pytest.mark.slow
def test_a_schedule_has_one_row_for_all_pieces(plan: remat.Plan) -> None:
    grid = ScheduleGrid.of(plan)
    operations = plan.graph.operations
    names = {operation.piece_of or operation.name for operation in operations}
    assert len(grid.lines) == grid.rows == len(names) < len(operations)
    assert sorted(op for ops in grid.lines for op in ops) == list(range(len(operations)))
    picture = schedule_svg(plan)
    assert f">mm x {PIECES}<" in picture
    assert f"mm x {PIECES} in head: runs at " in picture
    assert "mm_piece" not in picture
    ticks = [tick.get_text() for tick in schedule_figure(plan).axes[0].get_yticklabels()]
    assert f"mm x {PIECES}" in ticks


def test_a_step_without_pieces_has_a_row_for_each_operation() -> None:
    case = language_model()
    trace = remat.measure(remat.trace(case.model, case.args), COSTS)
    plan = remat.solve(trace, "100%", STRATEGY)
    grid = ScheduleGrid.of(plan)
    assert grid.lines == tuple((op,) for op in range(len(plan.graph)))


def test_annotated_code_shows_the_first_piece(module: remat.RematModule, plan: remat.Plan) -> None:
    assert module.program is not None
    code = annotated_code(module.program, plan)
    ast.parse(code)
    forward, backward = code.split("def backward")
    assert f"more statements: mm, _log_softmax, nll_loss_forward x {PIECES}" in forward
    assert f" x {PIECES}" in backward
    assert "mm_piece_0" in code
    shown = [line for line in code.splitlines() if " = aten.mm.default(" in line]
    assert not [line for line in shown if line.split(" = ")[0].count("piece_1")]
    assert len(code.splitlines()) < len(annotated_code(module.program).splitlines())


def test_the_curve_without_recomputation_is_that_of_the_pieces(plan: remat.Plan) -> None:
    assert "in pieces, without recomputation" in plan.to_svg()


def test_code_is_plotted_from_the_trace_as_it_was(plan: remat.Plan, tmp_path: Path) -> None:
    case = language_model()
    trace = remat.measure(remat.trace(case.model, case.args), COSTS)
    trace.save(tmp_path / "trace.json.gz")
    plan.save(tmp_path / "plan.json.gz")
    code = tmp_path / "code.py"
    paths = ("--trace", tmp_path / "trace.json.gz", "-o", code)
    ended = quick("plot", tmp_path / "plan.json.gz", "--kind", "code", *paths)
    assert ended.code == 0, ended.err
    assert f"x {PIECES}" in code.read_text()


def test_memory_snapshots_name_the_pieces_alike(plan: remat.Plan) -> None:
    (events,) = memory_snapshot(plan)["device_traces"]
    names = {event["frames"][0]["name"] for event in events}
    assert f"mm x {PIECES}" in names
    assert not [name for name in names if "_piece_" in name]


def test_a_comparison_has_rows_with_and_without_pieces() -> None:
    case = language_model()
    trace = remat.measure(remat.trace(case.model, case.args), COSTS)
    comparison = remat.compare(
        trace, ["50%"], [STRATEGY], measure_pieces=lambda trace: remat.measure(trace, COSTS)
    )
    without, with_pieces = comparison.rows
    assert (without.strategy, with_pieces.strategy) == ("auto", SPLIT_ROWS)
    assert without.plan is None
    assert with_pieces.plan is not None
    assert with_pieces.plan.graph.splits
    assert SPLIT_ROWS in comparison.describe()
    with pytest.raises(TypeError, match="compare needs a Trace"):
        remat.compare(trace.graph(), ["50%"], [STRATEGY], measure_pieces=lambda trace: trace)
