"""Pictures of a plan with an offloaded tensor: its copies, waiting, and the bytes on the host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.helpers.plans import plan_of

from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.plan_data import OffloadFigures
from remat.schedule import Schedule
from remat.view.chrome import chrome_trace
from remat.view.memory import memory_layers
from remat.view.picture import Area, Box
from remat.view.pictures import timeline_svg
from remat.view.timeline import timeline_picture

SIZES = {"a": 100, "sent": 0, "stored": 0, "y": 10, "buffer": 100, "grad": 10, "result": 10}
A, SENT, STORED, Y, BUFFER, GRAD, RESULT = range(len(SIZES))


def offloading_plan() -> Plan:
    """Return a plan in which `a` is copied to the host during `h`, for 2 s, and back during `b1`,
    for 4 s: the step waits 1 s for the former and 3 s for the latter."""
    once = {"recomputable": False}
    operations = (
        Operation("f", (), (A,), 1.0),
        Operation("offload", (A,), (SENT,), 0.0, **once),
        Operation("h", (A,), (Y,), 1.0),
        Operation("release", (A, SENT), (STORED,), 1.0, same_copy_as=1, **once),
        Operation("reload", (STORED,), (BUFFER,), 0.0, backward=True, **once),
        Operation("b1", (Y,), (GRAD,), 1.0, backward=True),
        Operation(
            "arrive", (BUFFER,), (A,), 3.0,
            backward=True, renews=(A,), overwrites=(BUFFER,), **once,
        ),
        Operation("b2", (A, GRAD), (RESULT,), 2.0, backward=True),
    )  # fmt: skip
    values = tuple(Value(name, size) for name, size in SIZES.items())
    graph = Graph(operations, values, results=frozenset({RESULT}))
    plan = plan_of(graph, Schedule.keep_all(graph))
    return replace(plan, offload=OffloadFigures(100, 6.0, 4.0, 50.0, 25.0))


def test_copies_and_waiting_are_those_counted_by_hand() -> None:
    _, lanes, host = timeline_picture(offloading_plan()).panels
    assert [row.text for row in lanes.rows] == ["to host", "to device", "waiting"]
    boxes = [item for item in lanes.items if isinstance(item, Box)]
    assert [(box.left, box.right, box.tip) for box in boxes] == [
        (1.0, 3.0, "a to host: 100 B in 2 s"),
        (3.0, 7.0, "a to device: 100 B in 4 s"),
        (2.0, 3.0, "waits 1 s for a"),
        (4.0, 7.0, "waits 3 s for a"),
    ]
    area = host.items[0]
    assert isinstance(area, Area)
    assert [column for column in area.columns if column[2]] == [(1.0, 7.0, 100)]


def test_what_comes_back_is_a_layer() -> None:
    layers = memory_layers(offloading_plan()).layers
    assert layers["reloaded"] == [0, 0, 0, 0, 100, 100, 100, 100]
    assert layers["activations"] == [100, 100, 110, 110, 10, 10, 0, 0]
    assert layers["recomputed"] == [0] * 8


def test_the_timeline_shows_copies_only_where_there_are_some() -> None:
    plan = offloading_plan()
    picture = timeline_svg(plan)
    for label in ("to host", "to device", "waiting", "on host", "at most 100 B"):
        assert f">{label}</text>" in picture
    assert ">without recomputation</text>" in picture
    for other in (timeline_svg(plan, x="runs"), timeline_svg(replace(plan, offload=None))):
        assert ">to host</text>" not in other


def test_the_baseline_is_the_step_without_copies() -> None:
    baseline = timeline_picture(offloading_plan()).panels[0].items[0]
    assert isinstance(baseline, Area)
    assert baseline.role == "baseline"
    assert {size for *_, size in baseline.columns} == {100, 110, 120}
    assert baseline.columns[-1][1] == pytest.approx(5.0, abs=0.01)


def test_perfetto_shows_copies_on_tracks_of_their_own() -> None:
    events = json.loads(chrome_trace(offloading_plan()))["traceEvents"]
    copies = [(e["tid"], e["ts"], e["dur"]) for e in events if e.get("cat") == "copy"]
    assert copies == [(3, 1e6, 2e6), (4, 3e6, 4e6)]
    on_host = [(e["ts"], e["args"]["on_host"]) for e in events if e["name"] == "host memory"]
    assert on_host == [(0.0, 0), (1e6, 100), (7e6, 0)]
