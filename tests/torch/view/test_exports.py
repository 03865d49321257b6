"""Exports of plans: Chrome traces, memory snapshots, annotated code, tables and graphs."""

from __future__ import annotations

import ast
import base64
import csv
import io
import json
import math
import pickle
import pickletools
import re
import runpy
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import networkx as nx
import pytest
import torch
from tests.helpers.graphs import chain
from tests.helpers.paths import DATA
from tests.helpers.plans import (
    HOSTILE,
    half_recomputed,
    hostile_plan,
    one_operation_graph,
    plan_of,
    plans,
)
from tests.helpers.training.models import gpt2
from torch import nn
from torch.cuda import _memory_viz

import remat
from remat.documents.arguments import Literal, Ref
from remat.documents.program import Binding, Program, Statement
from remat.documents.trace import Trace
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.schedule import Schedule
from remat.strategies import KeepAll, RecomputeAll
from remat.strategies.baselines.uniform import PerBlock
from remat.view import (
    annotated_code,
    chrome_trace,
    graph_dot,
    graph_graphml,
    memory_snapshot,
    operations_csv,
    plan_html,
    save_snapshot,
)
from remat.view.code import _statement_lines
from remat.view.tables import COLUMNS


@pytest.fixture(scope="module")
def traced() -> tuple[Trace, Plan, Program]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 1)
    )
    trace = remat.measure(remat.trace(model, (torch.randn(32, 16),)), device=remat.Roofline("h200"))
    plan = remat.solve(trace, "min", RecomputeAll())
    assert plan.schedule.recomputed(plan.graph)
    return trace, plan, remat.rewrite(trace, plan.schedule)


@pytest.fixture(scope="module")
def gpt2_plan() -> Plan:
    torch.manual_seed(0)
    case = gpt2(layers=1)
    traced = remat.trace(case.model, case.args, case.kwargs)
    return remat.solve(remat.measure(traced, device=remat.Roofline("h200")), "min", PerBlock())


# -- Chrome traces ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_chrome_trace_follows_the_trace_event_format(gpt2_plan: Plan) -> None:
    schema = json.loads((DATA / "trace_event.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    document = json.loads(chrome_trace(gpt2_plan))
    assert gpt2_plan.schedule.recomputed(gpt2_plan.graph)
    validator.validate(document)
    validator.validate(json.loads(chrome_trace(hostile_plan())))
    event = next(event for event in document["traceEvents"] if event["ph"] == "X")
    for wrong in ({"ph": "B"}, {"dur": -1.0}, {"ts": "0"}, {"args": {}}, {"color": "red"}):
        assert not validator.is_valid({"traceEvents": [event | wrong]})


@pytest.mark.slow
@hypothesis.given(plans())
def test_a_chrome_trace_has_every_run_and_the_memory(plan: Plan) -> None:
    document = json.loads(chrome_trace(plan))
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "C", "M")
        assert isinstance(event["name"], str)
        for key in ("ts", "pid", "tid"):
            assert isinstance(event[key], int | float)
            assert event[key] >= 0
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(plan.schedule)
    assert all(event["dur"] >= 0 for event in complete)
    assert math.fsum(event["dur"] for event in complete) == pytest.approx(plan.time_s * 1e6)
    for one, other in pairwise(complete):
        assert one["ts"] + one["dur"] == pytest.approx(other["ts"])
    recomputed_events = [event for event in complete if event["cat"] == "recompute"]
    assert len(recomputed_events) == sum(plan.schedule.recomputed(plan.graph).values())
    counters = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    timeline = plan.timeline()
    assert counters == [*timeline.during_bytes, timeline.after_bytes[-1]]


def test_a_chrome_trace_has_two_tracks() -> None:
    plan = half_recomputed(4)
    events = json.loads(chrome_trace(plan))["traceEvents"]
    track = [event["tid"] for event in events if event["ph"] == "X"]
    assert track == [1] * 5 + [2] * 5
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"forward", "backward"} <= names


# -- memory snapshots ---------------------------------------------------------------------------


def live_bytes(events: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Return (run, live bytes) after each event; check that no two live blocks overlap."""
    live: dict[int, int] = {}
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(address + size <= a or a + s <= address for a, s in live.items())
            live[address] = size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
        yield event["frames"][0]["line"], sum(live.values())


@pytest.mark.slow
@hypothesis.given(plans())
def test_a_snapshot_allocates_and_frees_as_simulated(plan: Plan) -> None:
    snapshot = memory_snapshot(plan)
    steps = list(live_bytes(snapshot["device_traces"][0]))
    assert max((size for _, size in steps), default=0) == plan.peak_bytes
    live = steps[-1][1] if steps else 0
    assert live == plan.timeline().after_bytes[-1]
    for segment in snapshot["segments"]:
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        active_bytes = [block["size"] for block in blocks if block["state"] == "active_allocated"]
        assert sum(active_bytes) == segment["allocated_size"] == live
        address = segment["address"]
        for block in blocks:
            assert block["address"] == address
            address += block["size"]


def test_torch_loads_a_snapshot(tmp_path: Path) -> None:
    graph = replace(half_recomputed(40).graph, constant_bytes=32 << 20)
    plan = plan_of(graph, half_recomputed(40).schedule)
    path = tmp_path / "snapshot.pickle"
    save_snapshot(plan, path)
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot == memory_snapshot(plan)
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "constant memory" in flames
    assert "remat:99:b0" in flames
    assert _memory_viz.segments(snapshot, format_flamegraph=str)
    unmatched = _memory_viz.filter_alloc_free_pairs(memory_snapshot(plan))["device_traces"][0]
    assert [event["action"] for event in unmatched] == ["alloc", "alloc"]
    first = next(e for e in snapshot["device_traces"][0] if e["frames"][0]["name"] == "f0")
    assert [(frame["filename"], frame["name"]) for frame in first["frames"]] == [
        ("layer.0", "f0"),
        ("module", "layer.0"),
        ("module", "layer"),
    ]


@pytest.mark.parametrize(
    ("command", "page"),
    [
        (["trace_plot"], "Active Memory Timeline"),
        (["trace_plot", "--segments"], "Active Cached Memory Timeline"),
        (["trace_plot", "--filter_freed"], "Active Memory Timeline"),
        (["segment_plot"], "Allocator State History"),
        (["stats"], None),
        (["trace"], None),
    ],
    ids=["trace plot", "segments over time", "what is left", "segment plot", "stats", "trace"],
)
def test_torchs_memory_viz_commands_read_a_snapshot(
    command: list[str],
    page: str | None,
    gpt2_plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in `python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o page.html`."""
    snapshot, html = tmp_path / "snapshot.pickle", tmp_path / "page.html"
    save_snapshot(gpt2_plan, snapshot)
    output = ["-o", str(html)] if page else []
    monkeypatch.setattr("sys.argv", ["_memory_viz", *command, str(snapshot), *output])
    runpy.run_path(_memory_viz.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    if page is None:
        events = memory_snapshot(gpt2_plan)["device_traces"][0]
        expected_text = "total_allocated" if command == ["stats"] else f"{len(events)} entries"
        assert expected_text in printed
        return
    assert not printed
    text = html.read_text()
    assert f"add_local_files(local_files, {page!r})" in text
    (encoded,) = re.findall(r'"base64": "([^"]+)"', text)
    shown = pickle.loads(base64.b64decode(encoded))
    events = [event["action"] for event in shown["device_traces"][0]]
    if "--filter_freed" in command:
        # Constant memory and the results are left at the end.
        results = gpt2_plan.graph.results
        sized = [v for v in results if gpt2_plan.graph.values[v].size_bytes]
        assert events == ["alloc"] * (1 + len(sized))
    else:
        assert shown == memory_snapshot(gpt2_plan)


def test_torch_compares_two_snapshots(gpt2_plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    eager = remat.solve(gpt2_plan.graph, "100%", KeepAll())
    before, after = (memory_snapshot(plan)["segments"] for plan in (eager, gpt2_plan))
    flames = _memory_viz.compare(before, after, format_flamegraph=str)
    assert "only_before;stream_0" in flames
    assert "only_after;stream_0" in flames
    assert "only_after = [139637976727552]" in capsys.readouterr().out


def test_a_snapshot_has_only_opcodes_that_the_viewer_unpickles(tmp_path: Path) -> None:
    save_snapshot(hostile_plan(), tmp_path / "snapshot.pickle")
    allowed_opcodes = {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("NEWTRUE", "NEWFALSE", "NONE"),
    }
    data = (tmp_path / "snapshot.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= allowed_opcodes


def test_a_plan_without_bytes_has_an_empty_snapshot() -> None:
    graph = chain(3, size=0)
    snapshot = memory_snapshot(plan_of(graph, Schedule.keep_all(graph)))
    assert snapshot["segments"] == []
    assert snapshot["device_traces"] == [[]]


# -- annotated code -----------------------------------------------------------------------------


def test_annotated_code_has_a_line_for_every_statement(traced: tuple[Trace, Plan, Program]) -> None:
    trace, plan, program = traced
    text = annotated_code(program, plan, trace)
    tree = ast.parse(text)
    forward, backward = tree.body
    assert isinstance(forward, ast.FunctionDef)
    assert isinstance(backward, ast.FunctionDef)
    assert (forward.name, backward.name) == ("forward", "backward")
    # In addition to the statements: the outputs, the saved values, and the return.
    assert len(forward.body) == len(program.forward) + 3
    assert len(backward.body) == len(program.backward) + 2
    recomputed = sum(plan.schedule.recomputed(plan.graph).values())
    assert text.count("recomputed, run ") == recomputed
    assert text.count("run 1 of ") == len(plan.schedule.recomputed(plan.graph))
    (state,) = program.rng_states
    assert text.count(f"saves {state}") == 1
    replays = [s for s in program.backward if s.rng_action and s.rng_action != "save"]
    assert text.count(f"replays {state}") == len(replays) > 0
    comments = [line.partition("  # ")[2] for line in text.splitlines()]
    saved_results = len(set(program.saved) & _made(program))
    assert sum("saved" in comment.split(", ") for comment in comments) == saved_results
    assert "  # 0, 8.00 KiB" in text
    assert "view" in text


def _made(program: Program) -> set[str]:
    return {bound.name for statement in program.forward for bound in statement.results}


def test_long_calls_are_wrapped_and_stay_one_statement() -> None:
    names = [f"argument_number_{i}" for i in range(20)]
    statement = Statement(
        target="aten.cat.default",
        args=tuple(map(Ref, names)),
        results=(Binding(name="y", position=0),),
        module="net.h.0",
    )
    lines = _statement_lines(statement, "net.h.0, 4 B")
    assert lines[0].endswith("  # net.h.0, 4 B")
    assert max(map(len, lines)) <= 100
    (assignment,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert ast.unparse(assignment) == f"y = aten.cat.default({', '.join(names)})[0]"


def test_annotated_code_has_bytes_and_times_of_the_plan(
    traced: tuple[Trace, Plan, Program],
) -> None:
    trace, plan, program = traced
    without_plan = annotated_code(program)
    assert "recomputed" in without_plan
    assert "KiB, " not in without_plan
    assert "KiB, " in annotated_code(program, trace=trace)
    assert re.search(r"recomputed, run [2-9] of [2-9]\b", annotated_code(program, plan))
    other = half_recomputed(4)
    assert annotated_code(program, other) == without_plan
    assert "aten.native_dropout" in plan_html(plan, program)


def test_literals_stay_on_their_line() -> None:
    statement = Statement(
        target="aten.add.Tensor",
        args=(
            Ref("x"),
            "'); import os #\n\u2028",
            (1,),
            (),
            math.inf,
            math.nan,
            1 + 2j,
            -0.0,
            None,
            Literal("dtype", "float32"),
            Literal("device", "cuda:0"),
            Literal("dtype", "x);y("),
        ),
        results=(Binding(name="y", position=0), Binding(name="z", position=2)),
    )
    (line,) = ast.parse(textwrap.dedent("\n".join(_statement_lines(statement, "net")))).body
    assert isinstance(line, ast.Assign)
    assert isinstance(line.value, ast.Call)
    assert ast.unparse(line.targets[0]) == "(y, _, z, *_)"
    assert len(line.value.args) == 12


# -- tables and graphs --------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_operation() -> None:
    plan = half_recomputed(6)
    rows = list(csv.DictReader(io.StringIO(operations_csv(plan))))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == len(plan.graph)
    assert sum(int(row["runs"]) for row in rows) == len(plan.schedule)
    assert sum(float(row["cost_s"]) + float(row["extra_s"]) for row in rows) == pytest.approx(
        plan.time_s
    )
    assert rows[1]["name"] == "f1"
    assert (rows[1]["first_run"], rows[1]["last_run"]) == ("1", "12")
    assert [row["result"] for row in rows] == ["0"] * 11 + ["1"]


def test_tables_take_hostile_names() -> None:
    plan = hostile_plan()
    rows = list(csv.reader(io.StringIO(operations_csv(plan))))
    assert len(rows) == len(HOSTILE) + 1
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row)
    g = nx.parse_graphml(graph_graphml(plan.graph))
    assert len(g) == len(HOSTILE)
    assert g.nodes["o0"]["name"] == HOSTILE[0]
    for line in graph_dot(plan.graph, plan).splitlines():
        assert line.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 0
    json.loads(chrome_trace(plan))
    memory_snapshot(plan)


def test_graphs_keep_operations_and_edges() -> None:
    plan = half_recomputed(5)
    graph = plan.graph
    edges = sum(len(users) for users in graph.consumers)
    text = graph_dot(graph, plan)
    assert text.count("->") == edges
    assert text.count("runs 2 times") == 2
    assert "runs 2 times" not in graph_dot(graph)
    g = nx.parse_graphml(graph_graphml(graph))
    assert len(g) == len(graph)
    assert g.number_of_edges() == edges
    assert g.nodes["o0"] == {
        "name": "f0",
        "cost": 1e-4,
        "size": 1 << 20,
        "workspace": 0,
        "backward": False,
        "recomputable": True,
        "module": "layer.0",
        "result": False,
    }


@pytest.mark.parametrize("graph", [Graph((), ()), one_operation_graph()], ids=["empty", "one"])
def test_degenerate_plans_have_exports(graph: Graph) -> None:
    plan = plan_of(graph, Schedule.keep_all(graph))
    assert len(json.loads(chrome_trace(plan))["traceEvents"]) == 3 + (3 if len(graph) else 0)
    assert memory_snapshot(plan)["device_traces"]
    assert operations_csv(plan).count("\n") == len(graph) + 1
    assert graph_dot(graph).startswith("digraph")
    assert len(nx.parse_graphml(graph_graphml(graph))) == len(graph)


def test_several_outputs_and_workspace_are_in_the_exports() -> None:
    graph = Graph(
        (
            Operation("two", (), (0, 1), 1.0, workspace_bytes=8),
            Operation("end", (0, 1), (2,), 1.0),
        ),
        (Value("a", 1), Value("b", 2), Value("c", 4)),
        results=frozenset({2}),
    )
    plan = plan_of(graph, Schedule.of([0, 1]))
    steps = list(live_bytes(memory_snapshot(plan)["device_traces"][0]))
    assert max(size for _, size in steps) == plan.peak_bytes == 11
    assert operations_csv(plan).splitlines()[1].split(",")[9:11] == ["3", "8"]
    assert graph_dot(graph).count("o0 -> o1") == 2
