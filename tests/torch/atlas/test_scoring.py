"""Solvers are scored by their schedules, whatever they say of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.atlas import graph_file, scoring
from benchmarks.atlas.graph_file import AtlasGraph
from benchmarks.atlas.results import Cell, Machine, ResultFolder, Row, SolverResult
from tests.helpers.doc_snippets import ROOT

import remat
from remat.documents.plan import GraphRecord
from remat.graph import Graph, Operation, Value

CELLS = [Cell("chain", "h100", "80%")]


def chain(layers: int = 8) -> Graph:
    """Return the step of a chain, whose backward reads all outputs of the forward."""
    operations = [
        Operation(f"forward_{i}", (i - 1,) if i else (), (i,), cost_s=1.0) for i in range(layers)
    ]
    operations += [
        Operation(
            f"backward_{i}",
            (layers - 1 - i, *((layers + i - 1,) if i else ())),
            (layers + i,),
            cost_s=2.0,
            backward=True,
        )
        for i in range(layers)
    ]
    values = tuple(Value(o.name, 1000) for o in operations)
    return Graph(tuple(operations), values, frozenset({2 * layers - 1}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResultFolder:
    """A folder of results, next to the graph of a chain."""
    graph = chain()
    costs_s = {"h100": tuple(o.cost_s for o in graph.operations)}
    document = AtlasGraph(
        name="chain", title="a chain", torch="2.13", costs_s=costs_s, graph=GraphRecord.of(graph)
    )
    path = tmp_path / "chain.json.gz"
    document.save(path)
    assert AtlasGraph.load(path).digest == document.digest
    monkeypatch.setattr(scoring, "path_of", lambda name: graph_file.path_of(name, tmp_path))
    scoring._graph.cache_clear()
    return ResultFolder(tmp_path / "results")


def row_of(folder: ResultFolder, program: str, limit_s: float = 60.0) -> Row:
    """Return the row of a Python program that is run as a solver."""
    path = folder.folder.parent / "solver.py"
    path.write_text(program)
    command = [sys.executable, str(path)]
    result = scoring.score("mine", command, CELLS, folder, limit_s=limit_s, processes=1)
    stored = SolverResult.load(scoring.solver_path(folder.folder, "mine"))
    assert stored == result
    (row,) = result.rows["chain"]
    return row


def test_the_greedy_solver_of_the_docs_meets_a_budget(folder: ResultFolder) -> None:
    program = (ROOT / "docs" / "atlas" / "greedy.py").read_text()
    row = row_of(folder, program)
    graph = chain()
    best = remat.solve(graph, "80%").overhead
    assert row.peak_bytes is not None
    assert row.overhead is not None
    assert row.peak_bytes <= 0.8 * 9000
    assert best - 1e-5 <= row.overhead <= 0.5


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("print([0, 1])", "never runs"),
        ("print('no JSON')", "not a schedule"),
        ("print('[true, false]')", "no JSON list of integers"),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", "not a schedule"),
        (f"print({list(range(16))})", "the peak is"),
        ("import sys; int(sys.argv[3]) == 9000 or sys.exit('it is too small')", "it is too small"),
        ("import time; time.sleep(60)", "no schedule in 1 s"),
    ],
)
def test_what_is_no_schedule_within_the_budget_has_a_reason(
    folder: ResultFolder, program: str, note: str
) -> None:
    row = row_of(folder, program, limit_s=1.0 if "sleep" in program else 60.0)
    assert row.overhead is None
    assert note in row.note


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        ("../mine", sys.executable, "cannot name a solver"),
        ("recompute", sys.executable, "cannot name a solver"),
        ("mine", "no-such-program", "there is no program"),
    ],
)
def test_wrong_names_and_programs_are_refused(
    folder: ResultFolder, name: str, program: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        scoring.score(name, [program], CELLS, folder, limit_s=1.0, processes=1)
    assert not folder.folder.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "No such file"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_solver_that_never_runs_has_no_row(
    folder: ResultFolder, program: str | None, message: str
) -> None:
    path = folder.folder.parent / "solver.py"
    if program is not None:
        path.write_text(program)
    with pytest.raises(SystemExit, match=f"the solver fails for chain .*{message}"):
        scoring.score("mine", [sys.executable, str(path)], CELLS, folder, limit_s=60, processes=1)
    assert not folder.folder.exists()


def test_a_program_that_is_no_executable_does_not_start(folder: ResultFolder) -> None:
    path = folder.folder.parent / "solver"
    path.write_bytes(bytes(64))
    path.chmod(0o755)
    with pytest.raises(SystemExit, match="does not start"):
        scoring.score("mine", [str(path)], CELLS, folder, limit_s=60, processes=1)
    assert not folder.folder.exists()


def test_rows_of_an_earlier_version_are_not_lost_with_some_cells_selected(
    folder: ResultFolder,
) -> None:
    row_of(folder, "print('[true]')")
    path = scoring.solver_path(folder.folder, "mine")
    stored = SolverResult.load(path)
    other = Row(gpu="h100", budget="60%", method="mine", note="stored")
    stored = stored.model_copy(update={"rows": stored.rows | {"other": (other,)}})
    stored.save(path)
    with pytest.raises(SystemExit, match=r"not selected: other on h100 at 60% \(1 in all\)"):
        row_of(folder, "print([0, 1])")
    assert SolverResult.load(path) == stored


def test_an_edited_solver_is_scored_once_more(folder: ResultFolder) -> None:
    assert "never runs" in row_of(folder, "print([0, 1])").note
    assert "no JSON list" in row_of(folder, "print('[true]')").note
    path = scoring.solver_path(folder.folder, "mine")
    stored = SolverResult.load(path)
    (row,) = stored.rows["chain"]
    marked = row.model_copy(update={"note": "stored"})
    stored.model_copy(update={"rows": {"chain": (marked,)}}).save(path)
    assert row_of(folder, "print('[true]')").note == "stored"  # the same program


def test_rows_of_another_version_or_machine_are_named(
    folder: ResultFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = AtlasGraph.load(folder.folder.parent / "chain.json.gz")
    first: Machine = {"cpu": "A", "cores": 2, "load_1min": 0.5}
    result = folder.load(graph, first).with_rows([Row(gpu="h100", budget="80%", method="x")], first)
    assert (result.remat, result.machine) == (remat.__version__, first)
    monkeypatch.setattr(remat, "__version__", "9.9")
    second: Machine = {"cpu": "B", "cores": 2, "load_1min": 0.2}
    for _ in range(2):
        result = result.with_rows([Row(gpu="h100", budget="60%", method="x")], second)
    assert result.remat.endswith("; 9.9")
    assert result.remat.count("9.9") == 1
    assert result.machine == {"cpu": "A; B", "cores": 2, "load_1min": 0.5}
    folder.save(result)
    assert folder.load(graph, second) == result


def test_stored_rows_of_another_graph_are_not_used(folder: ResultFolder) -> None:
    row_of(folder, f"print({json.dumps([0, 1])})")
    path = scoring.solver_path(folder.folder, "mine")
    stored = SolverResult.load(path)
    stale = (Row(gpu="h100", budget="80%", method="mine", note="stale"),)
    stored.model_copy(update={"graphs": {"chain": "0"}, "rows": {"chain": stale}}).save(path)
    assert "never runs" in row_of(folder, f"print({json.dumps([0, 1])})").note
