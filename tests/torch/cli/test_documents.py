"""`remat` on documents prints and writes what the library computes."""

from __future__ import annotations

import csv
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.helpers.command_line import Documents, command, quick, run, trace, write_documents
from tests.helpers.graphs import chain
from tests.helpers.process_limit import PROCESS_LIMIT_S

import remat
from remat.commands.common.plots import PLOT_WRITERS, PlotInput
from remat.commands.common.summaries import require_feasible_plan
from remat.documents.plan import SweepDocument
from remat.documents.program import Program
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.strategies import EveryK, KeepAll, Rotor

COMMANDS = ("trace", "estimate", "fit", "measure", "solve", "sweep", "compare", "explain", "diff",
            "plot", "run", "doctor", "serve", "worker", "keys")  # fmt: skip


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return write_documents(tmp_path_factory.mktemp("documents"))


def test_help_lists_every_command_without_importing_torch() -> None:
    code = (
        "import sys; sys.argv = ['remat', '--help']; import remat.cli\n"
        "try:\n    remat.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'matplotlib', 'networkx', 'sqlalchemy', 'uvicorn'} & {*sys.modules}"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    for name in COMMANDS:
        assert f" {name} " in completed.stdout


@pytest.mark.slow
def test_the_help_of_every_command_has_an_example() -> None:
    ended = quick("solve", "--help")
    assert ended.code == 0
    assert "Example: remat solve" in ended.out
    assert ended.err == ""


def test_version_prints_the_version() -> None:
    assert quick("--version").out.strip() == remat.__version__


def test_documents_go_through_pipes(documents: Documents) -> None:
    """As `remat measure - --roofline h200 --json < x.json.gz | remat solve - --budget 70% ...`."""
    measured = run(
        "measure", "-", "--roofline", "h200", "--json", stdin=documents.bare.read_bytes()
    )
    assert measured.code == 0
    assert measured.err.startswith(
        "remat: this trace was made for the CPU and is estimated for h200"
    )
    assert measured.err.count("\n") == 1
    priced = remat.Trace.from_json(measured.out)
    assert priced.cost_source == "roofline h200"
    assert priced == remat.measure(trace(), remat.Roofline("h200"))
    solved = run("solve", "-", "-b", "70%", "--strategy", "rotor", "--json",
                 stdin=measured.out.encode())  # fmt: skip
    assert (solved.code, solved.err) == (0, "")
    plan = Plan.from_json(solved.out)
    expected = remat.solve(priced, "70%", Rotor())
    assert plan.schedule == expected.schedule
    assert plan.peak_bytes <= plan.budget_bytes == expected.budget_bytes


def test_measure_prints_where_the_time_goes(documents: Documents) -> None:
    ended = quick("measure", documents.bare, "--roofline", "cpu")
    assert ended.code == 0
    assert "costs roofline cpu" in ended.out
    assert "aten.addmm.default" in ended.out
    assert "-o trace.json.gz" in ended.err


def test_solve_writes_a_plan_and_a_program(documents: Documents, tmp_path: Path) -> None:
    files = [tmp_path / "plan.json.gz", tmp_path / "program.json"]
    ended = quick("solve", documents.trace, "--budget", "80%", "--strategy", "every_k", "--option",
                "k=1", "-o", files[0], "--program", files[1])  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    plan = Plan.load(files[0])
    assert ended.out == f"{plan.describe()}\n"
    assert plan.stats["strategy"] == "every_k"
    traced = remat.Trace.load(documents.trace)
    assert plan.schedule == remat.solve(traced, "80%", EveryK(k=1)).schedule
    assert Program.load(files[1]) == remat.rewrite(traced, plan.schedule)


def test_a_sweep_can_be_saved_and_plotted(documents: Documents, tmp_path: Path) -> None:
    file, picture = tmp_path / "sweep.json.gz", tmp_path / "sweep.svg"
    ended = quick("sweep", documents.trace, "-b", "90%", "-b", "70%", "-b", "5%", "--strategy",
                "rotor", "--json", "-o", file)  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    decoded = json.loads(ended.out)
    plans = SweepDocument.load(file).to_plans(remat.Plan)
    assert [plan_fields["peak_bytes"] for plan_fields in decoded["plans"]] == [
        plan.peak_bytes for plan in plans
    ]
    assert len(plans) == 2  # 5% cannot be
    assert plans[0].overhead >= plans[1].overhead > 0
    assert quick("plot", file, "-o", picture).code == 0
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (["1kB", "2kB"], "none of the budgets 1kB, 2kB is feasible; `--budget min` finds"),
        (["1kB", "min"], "none of the budgets 1kB, min is feasible; another `--strategy`"),
        (None, "none of the budgets min to 100% is feasible; another `--strategy`"),
    ],
)
def test_without_a_feasible_budget_the_error_names_the_budgets(
    budgets: list[str] | None, message: str
) -> None:
    with pytest.raises(remat.RematError, match=message):
        require_feasible_plan([], budgets)


def test_compare_prints_a_table_and_writes_files(documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "compared.csv"
    ended = quick("compare", documents.trace, "-b", "70%", "-b", "min", "--strategies",
                "keep_all,rotor,articulation_points", "-o", file)  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    names = ["keep_all", "rotor", "ap_sqrt", "ap_greedy"]
    assert [row["strategy"] for row in rows] == [name for name in names for _ in range(2)]
    for name in names:
        assert name in ended.out
    assert rows[0]["peak_bytes"] == ""
    assert int(rows[2]["peak_bytes"]) <= int(rows[2]["budget_bytes"])


@pytest.mark.slow
def test_explain_prints_what_the_library_explains(documents: Documents) -> None:
    plan = Plan.load(documents.plan)
    recomputed = plan.schedule.recomputed(plan.graph)
    op, times = next(iter(recomputed.items()))
    name = plan.graph.operations[op].name
    assert quick("explain", documents.plan).out == f"{plan.describe()}\n"
    message = quick("explain", documents.plan, name, "--json").out
    (operation,) = json.loads(message)["operations"]
    assert operation["recomputations"] == times == len(operation["runs"]) - 1
    assert operation["cost_s"] == plan.graph.operations[op].cost_s
    words = quick("explain", documents.plan, name, "transformer.h.0.mlp")
    assert words.out.startswith(f"{plan.explain(name)}\n\ntransformer.h.0.mlp: ")
    within = json.loads(quick("explain", documents.plan, "transformer.h.0", "--json").out)
    modules = {message["module"] for message in within["operations"]}
    assert "transformer.h.0.mlp.act" in modules
    assert all(f"{module}.".startswith("transformer.h.0.") for module in modules)
    unknown = quick("explain", documents.plan, name, f"{name}x")
    assert unknown.code == 1
    assert name in unknown.error


@pytest.mark.slow
def test_explain_solve_prints_the_steps(documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = remat.solve(remat.Trace.load(documents.trace), "min", remat.Auto(time_limit=5.0))
    plan.save(file)
    message = quick("explain", file, "--solve").out
    assert message == f"{plan.describe(solve=True)}\n"
    assert message.startswith(f"{plan.describe()}\n\nsmallest peak ")
    decoded = json.loads(quick("explain", file, "--solve", "--json").out)
    assert [step["step"] for step in decoded["solve"]] == str(plan.stats["steps"]).split()
    assert all(step["seconds_s"] >= 0 for step in decoded["solve"])
    assert "solve" not in json.loads(quick("explain", file, "--json").out)
    name = plan.graph.operations[0].name
    words = quick("explain", file, name, "--solve").out
    assert words.startswith(f"{plan.explain(name)}\n\nsmallest peak ")
    assert quick("explain", documents.plan, "--solve").out.endswith("search in steps\n")


def test_diff_prints_the_changed_operations(documents: Documents) -> None:
    plan, other = Plan.load(documents.plan), Plan.load(documents.other)
    assert quick("diff", documents.plan, documents.other).out == f"{plan.diff(other)}\n"
    decoded = json.loads(quick("diff", documents.plan, documents.other, "--json").out)
    assert decoded["before"]["peak_bytes"] == plan.peak_bytes
    assert decoded["after"]["overhead"] == other.overhead
    assert all(e["before_recomputations"] != e["after_recomputations"] for e in decoded["changed"])
    assert decoded["changed"]


@pytest.mark.parametrize(("kind", "suffix"), PLOT_WRITERS)
def test_every_kind_of_drawing_can_be_written(kind: str, suffix: str, documents: Documents) -> None:
    plan, traced = Plan.load(documents.plan), remat.Trace.load(documents.trace)
    picture = PLOT_WRITERS[kind, suffix](PlotInput([plan], traced, "h200"))
    if suffix == ".png":
        assert isinstance(picture, bytes)
        assert picture.startswith(b"\x89PNG")
    elif suffix == ".pdf":
        assert isinstance(picture, bytes)
        assert picture.startswith(b"%PDF")
    elif isinstance(picture, bytes):
        assert pickle.loads(picture)["segments"]
    elif suffix in (".svg", ".graphml", ".html"):
        ElementTree.fromstring(picture.removeprefix("<!DOCTYPE html>\n"))
    elif suffix == ".json":
        assert json.loads(picture)["traceEvents"]
    elif suffix == ".py":
        compile(picture, "code", "exec")
    elif suffix == ".dot":
        assert picture.startswith("digraph")
    else:
        assert len(list(csv.reader(io.StringIO(picture)))) > 1


def test_plot_infers_the_kind_of_drawing(documents: Documents, tmp_path: Path) -> None:
    code, page = tmp_path / "code.py", tmp_path / "page.html"
    ended = quick("plot", documents.plan, "--trace", documents.trace, "-o", code)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert "def backward(" in code.read_text()
    assert quick("plot", "-", "-o", page, stdin=documents.plan.read_bytes()).code == 0
    assert "Rematerialization plan" in page.read_text()


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202e"
    file = tmp_path / "evil.json"
    graph = chain(3)
    operations = tuple(
        Operation(f"{evil}{i}", o.inputs, o.outputs, o.cost_s, module=evil, backward=o.backward)
        for i, o in enumerate(graph.operations)
    )
    values = tuple(Value(f"{evil}{i}", v.size_bytes) for i, v in enumerate(graph.values))
    named = Graph(operations, values, graph.results, graph.constant_bytes, graph.boundary)
    remat.solve(named, "100%", KeepAll()).save(file)
    for arguments in ([f"{evil}0"], [f"{evil}0", "--json"], ["red"]):
        ended = quick("explain", file, *arguments)
        assert "red" in ended.out + ended.err
        for text in (ended.out, ended.err):
            assert all(character.isprintable() for character in text.replace("\n", ""))


def test_a_closed_pipe_is_no_error(documents: Documents) -> None:
    process = subprocess.Popen(
        command("explain", documents.plan), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=PROCESS_LIMIT_S)
    assert err == b""


@pytest.mark.slow
def test_shells_can_complete_names() -> None:
    env = {"_REMAT_COMPLETE": "complete_bash", "COMP_WORDS": "remat solve --strategy ch",
           "COMP_CWORD": "3"}  # fmt: skip
    assert run(env=env).out.split() == ["chen_sqrt", "chen_greedy", "checkmate"]
