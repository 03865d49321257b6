"""Pictures and pages of plans: true to the simulator, well-formed, escaped, small and fast."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.helpers.graphs import chain
from tests.helpers.laws import peak_of
from tests.helpers.plans import (
    SVG,
    half_recomputed,
    hostile_plan,
    one_operation_graph,
    plan_of,
    plans,
)

from remat.compare import Comparison, compare
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.report.comparison import ComparisonRow
from remat.schedule import Schedule
from remat.solve import solve, sweep
from remat.strategies.auto import Auto
from remat.strategies.baselines.uniform import PerBlock, RecomputeAll
from remat.view import (
    frontier_svg,
    modules_svg,
    plan_fragment,
    plan_html,
    schedule_svg,
    timeline_svg,
)
from remat.view.frontier import frontier_picture
from remat.view.memory import earlier_run_counts, first_backward_run, memory_layers
from remat.view.modules import MAX_BARS, recomputation_by_module
from remat.view.picture import Line, Unit, byte_unit, decimal_ticks, second_unit
from remat.view.svg import coordinate_text
from remat.view.text import escape_markup, plain_text, shorten_name
from remat.view.timeline import MAX_COLUMNS, peak_columns

PICTURES: tuple[Callable[[Plan], str], ...] = (
    timeline_svg,
    schedule_svg,
    modules_svg,
    lambda plan: frontier_svg([plan]),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(chain(8, size=1 << 20, cost=0.001), "60%")


@pytest.mark.slow
@hypothesis.given(plans())
def test_the_layers_add_up_to_the_simulated_memory_at_every_run(plan: Plan) -> None:
    occupied = memory_layers(plan)
    totals = [sum(column) for column in zip(*occupied.layers.values(), strict=True)]
    assert totals == list(plan.timeline().during_bytes)
    assert min(min(layer) for layer in occupied.layers.values()) >= 0
    assert max(totals) == plan.peak_bytes


def test_layers_of_the_timeline_are_those_counted_by_hand() -> None:
    # f0 f1 f2 b2 b1 f0 b0: f0 is dropped after f1 and recomputed for b0, which is the result.
    graph = replace(chain(3, size=10), constant_bytes=7)
    operations = list(graph.operations)
    operations[4] = replace(operations[4], workspace_bytes=5)
    graph = replace(graph, operations=tuple(operations))
    layers = memory_layers(plan_of(graph, Schedule.of([0, 1, 2, 3, 4, 0, 5]))).layers
    assert layers == {
        "constant": [7] * 7,
        "results": [0, 0, 0, 0, 0, 0, 10],
        "activations": [10, 20, 20, 20, 10, 0, 0],
        "activation-gradients": [0, 0, 0, 10, 20, 10, 10],
        "recomputed": [0, 0, 0, 0, 0, 10, 10],
        "reloaded": [0] * 7,
        "workspace": [0, 0, 0, 0, 5, 0, 0],
    }


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from((0.0, 0.0, 0.25, 1.0, 7.5)), st.integers(0, 9)), min_size=1),
    st.integers(1, 12),
)
def test_a_column_shows_the_largest_run_that_touches_it(
    runs: list[tuple[float, int]], count: int
) -> None:
    starts = [0.0]
    for cost, _ in runs:
        starts.append(starts[-1] + cost)
    memory = [size for _, size in runs]
    columns = peak_columns(starts, memory, starts[-1], count)
    if not starts[-1]:
        assert not columns
        return
    assert len(columns) <= count
    assert max(memory[run] for *_, run in columns) == max(memory)
    assert columns[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(columns))
    for left, right, run in columns:
        assert starts[run] <= right
        assert starts[run + 1] >= left
        inside = [m for r, m in enumerate(memory) if left < starts[r + 1] and starts[r] < right]
        assert memory[run] >= max(inside)


def test_the_timeline_has_budget_boundary_layers_and_the_eager_curve(plan: Plan) -> None:
    root = ElementTree.fromstring(timeline_svg(plan))
    classes = [str(element.get("class")) for element in root.iter()]
    layers = memory_layers(plan).used
    assert [c.removeprefix("remat-") for c in classes if c.removeprefix("remat-") in layers] == (
        layers[::-1]
    )
    assert classes.count("remat-baseline") == 1
    assert classes.count("remat-budget") == 1
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"forward", "backward", "memory (MiB)", "time (ms)"} <= set(texts)
    assert any(text and text.startswith("budget ") for text in texts)
    # The highest corner of the stack is the peak, on the axis that the labels give.
    numbers = [e for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "end"]
    height = {element.text: float(element.get("y", 0)) - 4 for element in numbers}
    scale = (height["0"] - height["8"]) / (8 << 20)
    outline = next(e for e in root.iter() if e.get("class") == f"remat-{layers[-1]}")
    top = min(float(y) for y in re.findall(r"V([\d.]+)", outline.get("d", "")))
    assert (height["0"] - top) / scale == pytest.approx(plan.peak_bytes, rel=0.01)


def test_the_timeline_counts_runs_on_request_or_without_costs(plan: Plan) -> None:
    free = chain(4, size=1 << 20, cost=0.0)
    for picture in (
        timeline_svg(plan, x="runs"),
        timeline_svg(plan_of(free, Schedule.keep_all(free))),
    ):
        assert "runs" in [e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_budget_far_above_the_peak_is_written_instead_of_marked() -> None:
    graph = chain(4, size=1 << 20)
    picture = timeline_svg(plan_of(graph, Schedule.keep_all(graph), budget_bytes=1 << 40))
    assert "budget 1.00 TiB, far above" in picture
    assert '<line class="remat-budget"' not in picture
    assert not re.search(r'<line[^>]*class="remat-budget"', picture)


def test_the_schedule_marks_every_run_and_every_recomputation() -> None:
    plan = half_recomputed(8)
    root = ElementTree.fromstring(schedule_svg(plan))
    strokes = {str(e.get("class")): e.get("d", "").count("M") for e in root.iter(f"{SVG}path")}
    assert strokes["remat-run"] == len(plan.graph)
    assert strokes["remat-recomputation"] == 4
    assert strokes["remat-live-recomputed"] == 4
    hovers = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "remat-hover"]
    assert len(hovers) == len(plan.graph)
    assert "f1 in layer.1: runs at 1, 17; 100 µs, 1.00 MiB" in "".join(root.itertext())


def test_many_rows_are_labelled_by_module() -> None:
    plan = half_recomputed(80)
    backward = {"b79": "head", "b0": ""}
    operations = tuple(
        replace(o, module=f"net.h.{i // 20}.mlp" if i % 20 else "net", cost_s=1e-3)
        if i < 80
        else replace(o, module=backward.get(o.name, "net.h.3.mlp.act"))
        for i, o in enumerate(plan.graph.operations)
    )
    plan = replace(plan, graph=replace(plan.graph, operations=operations))
    root = ElementTree.fromstring(schedule_svg(plan))
    labels = [t.text or t[0].tail for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "end"]
    assert labels == ["net.h.0", "net.h.1", "net.h.2", "net.h.3", "net.h.3", "forward"]
    # Also where all modules have a long common prefix.
    deep = tuple(replace(o, module=f"a.b.c.d.{o.module}" if o.module else "") for o in operations)
    plan = replace(plan, graph=replace(plan.graph, operations=deep))
    root = ElementTree.fromstring(schedule_svg(plan))
    labels = [t[0].tail for t in root.iter(f"{SVG}text") if len(t)]
    assert labels == [f"a.b.c.d.net.h.{i}" for i in (0, 1, 2, 3, 3)]


def test_the_frontier_has_plans_bounds_baselines_and_the_device() -> None:
    graph = chain(8, size=1 << 20, cost=0.001)
    plans = sweep(graph, ["60%", "80%", "100%"])
    expensive = half_recomputed(8)
    rows = [
        ComparisonRow("per_block", "50%", 1, expensive, "", 0.0),
        ComparisonRow("every_k", "50%", 1, expensive, "", 0.0),
        ComparisonRow("revolve", "50%", None, None, "does not fit", 0.0),
    ]
    picture = frontier_svg(plans, rows, capacity_bytes=4 << 20)
    root = ElementTree.fromstring(picture)
    classes = [element.get("class") for element in root.iter(f"{SVG}circle")]
    assert classes.count("remat-run") == len(plans) + 1
    assert classes.count("remat-bound-dot") == len(plans) + 1  # and one in the legend
    words = "".join(root.itertext())
    assert "device 4.00 MiB" in words
    assert "every_k" in words
    assert "revolve" not in words
    # Both baselines have the same plan: their marks do not hide each other, and are at its place.
    roles = ("remat-point", "remat-ring")
    marks = [e for e in root.iter(f"{SVG}path") if e.get("class") in roles]
    assert [e.get("class") for e in marks].count("remat-ring") == 1
    assert len({e.get("d") for e in marks}) == len(marks) == 4
    assert "far beyond" in frontier_svg(plans, capacity_bytes=1 << 40)
    assert "no plans" in frontier_svg([])
    assert "device 141 GiB" not in frontier_svg(plans)
    assert "far beyond" in frontier_svg(plans, Comparison(tuple(rows), 1, 1.0), device="h200")
    with pytest.raises(ValueError, match="unknown device"):
        frontier_svg(plans, device="abacus")


def test_the_frontier_has_steps_within_which_the_optimum_lies() -> None:
    graph = chain(8, size=1 << 20, cost=0.001)
    items = frontier_picture(sweep(graph, ["60%", "80%"])).panels[0].items
    plan_steps, bound_steps = (item.points for item in items if isinstance(item, Line))
    assert plan_steps[-1] == (peak_of(graph), 0.0)
    assert (len(plan_steps), len(bound_steps)) == (5, 3)
    for corners in (plan_steps, bound_steps):
        for (x, y), (a, b) in pairwise(corners):
            assert x <= a
            assert y >= b
            assert x == a or y == b
    # A plan is valid for every larger budget, a bound for every smaller one.
    assert plan_steps[1] == (plan_steps[2][0], plan_steps[0][1])
    assert bound_steps[1] == (bound_steps[0][0], bound_steps[2][1])


def test_points_far_outside_the_frontier_are_written_above_it() -> None:
    plans = sweep(chain(8, size=1 << 20, cost=0.001), ["90%"])
    expensive = half_recomputed(8)
    rows = [ComparisonRow(name, "50%", 1, expensive, "", 0.0) for name in ("per_block", "every_k")]
    least = max(plan.overhead for plan in plans)
    assert expensive.overhead > 1.5 * least
    assert f"above: per_block {expensive.overhead:+.0%}, every_k" in frontier_svg(plans, rows)
    # Without plans, the axis is scaled to most of the baselines.
    slow = replace(expensive, time_s=40 * expensive.time_s)
    rows.append(ComparisonRow("slow", "50%", 1, slow, "", 0.0))
    assert f"above: slow {slow.overhead:+,.0%}" in frontier_svg([], rows)


def test_the_picture_of_a_comparison_has_every_baseline() -> None:
    graph = chain(8, size=1 << 20, cost=0.001)
    compared = compare(graph, ["60%", "90%"], [Auto(time_limit=5), PerBlock(), RecomputeAll()])
    picture = compared.to_svg(device="h200")
    words = "".join(ElementTree.fromstring(picture).itertext())
    assert "2 plans, from " in words
    assert "lower bound" in words
    assert "recompute_all" in words
    assert "device 140 GiB" in words
    shown = ElementTree.fromstring(compared._repr_html_())
    assert shown.tag == "div"
    assert compared.describe() in "".join(shown.itertext())
    assert len(list(shown.iter(f"{SVG}svg"))) == 1


def test_modules_are_grouped_to_fit_the_number_of_bars() -> None:
    few = recomputation_by_module(half_recomputed(16))
    assert [share.name for share in few] == [f"layer.{i}" for i in range(1, 16, 2)]
    assert all((share.runs, share.size_bytes) == (1, 1 << 20) for share in few)
    assert [share.name for share in recomputation_by_module(half_recomputed(200))] == ["layer.*"]
    plan = half_recomputed(200)
    operations = tuple(replace(o, module=f"part{i}") for i, o in enumerate(plan.graph.operations))
    many = recomputation_by_module(replace(plan, graph=replace(plan.graph, operations=operations)))
    assert len(many) == MAX_BARS
    assert many[-1].name == "77 more"
    assert sum(share.runs for share in many) == 100
    assert sum(share.time_s for share in many) == pytest.approx(plan.time_s - plan.baseline_time_s)


def test_a_page_is_complete_and_well_formed(plan: Plan) -> None:
    page = plan_html(plan)
    root = ElementTree.fromstring(page)
    words = "".join(root.itertext())
    assert plan.describe() in words
    assert f"{plan.overhead:+.2%}" in words
    assert len(list(root.iter(f"{SVG}svg"))) == 3
    rows = list(next(root.iter("tbody")))
    assert len(rows) == len(plan.schedule.recomputed(plan.graph))
    assert plan.to_html() == page
    assert plan.to_svg() == timeline_svg(plan)
    fragment = plan._repr_html_()
    assert fragment == plan_fragment(plan)
    assert ElementTree.fromstring(fragment).tag == "div"
    for text in (page, fragment):
        assert "<script" not in text
        assert not re.search(r"(src|href)=|url\(|@import", text)


def test_pictures_have_labels_for_screen_readers(plan: Plan) -> None:
    for picture in PICTURES:
        root = ElementTree.fromstring(picture(plan))
        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 20
        assert root[0].tag == f"{SVG}title"
        assert "prefers-color-scheme:dark" in "".join(root.itertext())


def test_hostile_names_are_escaped() -> None:
    plan = hostile_plan()
    for text in (*(picture(plan) for picture in PICTURES), plan_html(plan), plan_fragment(plan)):
        root = ElementTree.fromstring(text)
        assert "<script" not in text
        assert "<b>\n" not in text
        assert not any("onload" in element.attrib for element in root.iter())
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            *("svg", "g", "title", "desc", "style", "rect", "text", "line", "path", "circle"),
            *("html", "head", "meta", "body", "main", "h1", "h2", "div", "b", "span", "p"),
            *("pre", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
        }
        assert not set(text) & set("\x00\x1b\x85\u2028\u202e\ud800")
        text.encode()


def test_text_is_plain_short_and_escaped() -> None:
    assert plain_text("a\nb\tc\x00\u202ed") == "a b c\ufffd\ufffdd"
    assert escape_markup("<a b='c' d=\"e\">&") == "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;"
    assert shorten_name("transformer.h.11.mlp", 12) == "tra…h.11.mlp"
    assert shorten_name("short", 5) == "short"
    assert [coordinate_text(x) for x in (1.0, 0.125, -0.001, 10.5, 100)] == [
        "1",
        "0.12",
        "0",
        "10.5",
        "100",
    ]


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    gib = byte_unit(7 << 30)
    assert gib == Unit("GiB", 1 << 30)
    assert gib.ticks(0, 7 << 30) == [i * 2.0**30 for i in range(8)]
    assert [gib.label(tick) for tick in (0, 512 << 20, 1 << 30, 1500 << 30)] == (
        ["0", "0.5", "1", "1,500"]
    )
    assert [byte_unit(size).name for size in (0, 1023, 1024, 2.0**41, 2.0**60)] == (
        ["B", "B", "KiB", "TiB", "TiB"]
    )
    assert [second_unit(time).name for time in (0, 5e-8, 3e-6, 0.002, 1, 7200)] == (
        ["ns", "ns", "µs", "ms", "s", "s"]
    )
    milliseconds = second_unit(0.0025)
    assert [milliseconds.label(tick) for tick in milliseconds.ticks(0, 0.0025)] == (
        ["0", "0.5", "1", "1.5", "2", "2.5"]
    )
    assert decimal_ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert decimal_ticks(3, 3) == [3]
    for high in (1e-9, 0.37, 12.0, 4.1e9):
        assert 4 <= len(decimal_ticks(0, high)) <= 9
        assert 4 <= len(byte_unit(high).ticks(0, high)) <= 9


@pytest.mark.parametrize(
    "graph",
    [
        Graph((), ()),
        one_operation_graph(),
        replace(one_operation_graph(), operations=(Operation("only", (), (0,), 0.0),)),
        replace(one_operation_graph(), values=(Value("v", 0),)),
        replace(chain(60), constant_bytes=3, boundary=None),
        chain(5, size=0, cost=0.0),
    ],
    ids=["empty", "one", "free", "no bytes", "no boundary", "nothing at all"],
)
def test_degenerate_graphs_have_pictures(graph: Graph) -> None:
    plan = plan_of(graph, Schedule.keep_all(graph))
    assert plan.lower_bound is None
    for picture in (*PICTURES, plan_html, plan_fragment):
        ElementTree.fromstring(picture(plan))
    assert "NaN" not in plan_html(plan)
    assert "nan" not in timeline_svg(plan)


@hypothesis.given(plans())
def test_any_plan_has_pictures(plan: Plan) -> None:
    for picture in PICTURES:
        ElementTree.fromstring(picture(plan))


def test_the_backward_begins_at_the_boundary_or_the_first_backward_operation() -> None:
    plan = half_recomputed(4)
    assert first_backward_run(plan) == 5
    operations = list(plan.graph.operations)
    operations[6] = replace(operations[6], recomputable=False)
    marked = replace(plan.graph, operations=tuple(operations), boundary=6)
    assert first_backward_run(replace(plan, graph=marked)) == plan.schedule.runs.index(6)
    assert first_backward_run(plan_of(one_operation_graph(), Schedule.of([0]))) is None
    assert earlier_run_counts(plan.schedule)[:7] == [0, 0, 0, 0, 1, 0, 0]


@pytest.mark.slow
def test_pictures_of_5000_operations_are_fast_and_small() -> None:
    plan = half_recomputed(2500)
    assert len(plan.graph) == 5000
    assert len(plan.schedule) == 6250
    began = time.process_time()
    page = plan_html(plan)
    spent_s = time.process_time() - began
    assert spent_s < 2
    assert len(page.encode()) < 3_000_000
    for picture in PICTURES:
        assert len(picture(plan).encode()) < 1_000_000
    d = re.findall(r'd="([^"]*)"', timeline_svg(plan))
    assert max(path.count("V") for path in d) <= MAX_COLUMNS + 1
