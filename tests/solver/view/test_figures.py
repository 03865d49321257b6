"""The pictures as matplotlib figures: the same text, colours and data as the SVGs."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tests.helpers.plans import SVG, half_recomputed, hostile_plan, one_operation_graph, plan_of
from tests.helpers.process_limit import PROCESS_LIMIT_S

from remat.errors import RematError
from remat.graph import Graph
from remat.plan import Plan
from remat.report.comparison import ComparisonRow
from remat.schedule import Schedule
from remat.view import (
    frontier_figure,
    frontier_svg,
    modules_figure,
    modules_svg,
    schedule_figure,
    schedule_svg,
    timeline_figure,
    timeline_svg,
)
from remat.view.figures import role_colour

DrawFigure = Callable[[Plan], Figure]


def _rows(plan: Plan) -> list[ComparisonRow]:
    graph = plan.graph
    cheap = plan_of(graph, Schedule.keep_all(graph))
    return [
        ComparisonRow("keep_all", "100%", 1, cheap, "", 0.0),
        ComparisonRow("per_block", "1%", 1, plan, "", 0.0),
    ]


PAIRS: dict[str, tuple[DrawFigure, Callable[[Plan], str]]] = {
    "timeline": (timeline_figure, timeline_svg),
    "timeline by runs": (
        lambda plan: timeline_figure(plan, x="runs"),
        lambda plan: timeline_svg(plan, x="runs"),
    ),
    "schedule": (schedule_figure, schedule_svg),
    "modules": (modules_figure, modules_svg),
    "frontier": (
        lambda plan: frontier_figure([plan], _rows(plan), device="h200"),
        lambda plan: frontier_svg([plan], _rows(plan), device="h200"),
    ),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return half_recomputed(6)


def words(figure: Figure) -> set[str]:
    """Return every text of a figure."""
    figure.draw_without_rendering()
    texts = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return {artist.get_text() for artist in texts if artist.get_visible()}


@pytest.mark.parametrize(("figure", "picture"), PAIRS.values(), ids=PAIRS)
def test_a_figure_has_the_text_of_the_picture(
    figure: DrawFigure, picture: Callable[[Plan], str], plan: Plan
) -> None:
    root = ElementTree.fromstring(picture(plan))
    title, summary, *others = (e[0].tail if len(e) else e.text for e in root.iter(f"{SVG}text"))
    shown = words(figure(plan))
    assert f"{title}: {summary}" in shown
    assert set(others) <= shown | {"per_block", "recomputed"}
    assert {"per_block", "recomputed"} & set(others) <= shown


def test_a_figure_has_the_colours_and_the_data_of_the_picture(plan: Plan) -> None:
    (axes,) = timeline_figure(plan).axes
    filled = {to_hex(patch.get_facecolor()): patch for patch in axes.patches}
    roles = ("activations", "recomputed", "baseline")
    assert {role_colour(role) for role in roles} <= set(filled)
    assert max(filled[role_colour("baseline")].get_data().values) == plan.baseline_peak_bytes
    (axes,) = schedule_figure(plan).axes
    lines_by_color = {to_hex(lines.get_color()[0]): lines for lines in axes.collections}
    assert len(lines_by_color[role_colour("run")].get_segments()) == len(plan.graph)
    recomputed = sum(plan.schedule.recomputed(plan.graph).values())
    assert len(lines_by_color[role_colour("recomputation")].get_segments()) == recomputed


@pytest.mark.parametrize("form", ["pdf", "png"])
def test_a_figure_can_be_saved_for_a_paper(form: str) -> None:
    file = io.BytesIO()
    schedule_figure(half_recomputed(100)).savefig(file, format=form)
    assert file.getvalue().startswith(b"%PDF" if form == "pdf" else b"\x89PNG")
    assert len(file.getvalue()) < 1_000_000


@pytest.mark.parametrize(
    "odd",
    [
        hostile_plan(),
        plan_of(one_operation_graph(), Schedule.of([0])),
        plan_of(Graph((), ()), Schedule.of([])),
    ],
    ids=["hostile", "one", "empty"],
)
def test_degenerate_plans_have_figures_and_settings_are_restored(odd: Plan) -> None:
    settings = dict(matplotlib.rcParams)
    for figure, _ in PAIRS.values():
        figure(odd).draw_without_rendering()
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.slow
def test_matplotlib_is_imported_at_the_first_figure_and_its_state_is_unchanged() -> None:
    code = """
import sys
import remat.view
assert "matplotlib" not in sys.modules
from tests.helpers.plans import half_recomputed
figure = remat.view.modules_figure(half_recomputed(4))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PROCESS_LIMIT_S)


def test_without_matplotlib_the_error_names_the_package(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for figure, _ in PAIRS.values():
        with pytest.raises(RematError, match=r"pip install 'remat\[viz\]'"):
            figure(plan)
