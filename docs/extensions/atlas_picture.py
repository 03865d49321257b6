"""The picture of a model in the atlas: extra time against peak memory on one GPU."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from benchmarks.atlas.results import (
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    SPLIT,
    ModelResult,
    Row,
)

from remat.view.drawing import svg
from remat.view.drawing.axes import PERCENT, Axis, Unit, bottom_axis, left_axis
from remat.view.drawing.marks import strategy_mark

WIDTH, HEIGHT = 760.0, 300.0
LEFT, RIGHT, TOP = 60.0, 24.0, 88.0
SHARE = Unit("%", 0.01)
OPTIMA = {RECOMPUTE: "#0072b2", SPLIT: "#d55e00", OFFLOAD: "#009e73"}
"""The lines of the picture, with their colours."""

_CLIP = 1.3
"""The vertical axis ends at this number times the largest extra time of a line."""

Point = tuple[float, float]
"""Share of the peak, and extra time."""


def picture(result: ModelResult, gpu: str, solvers: Iterable[Row] = ()) -> str:
    """Return the SVG of a model on a GPU: a line for each kind of plan, the bound of recomputation,
    and points for the policies and the rows of solvers."""
    lines = {method: _points(result, gpu, method) for method in OPTIMA}
    marks = {method: _points(result, gpu, method) for method in POLICIES}
    for row in solvers:
        if (
            row.gpu == gpu
            and row.peak_bytes is not None
            and row.overhead is not None
        ):
            point = (row.peak_bytes / result.baseline_peak_bytes, row.overhead)
            marks.setdefault(row.method, []).append(point)
    highest = max((y for points in lines.values() for _, y in points), default=0.0)
    top = _CLIP * max(highest, 0.02)
    bottom, right = TOP + HEIGHT, WIDTH - RIGHT
    x_axis = Axis(0.0, 1.03, LEFT, right - LEFT)
    y_axis = Axis(0.0, top, bottom, -HEIGHT)
    title = f"{result.title} on {gpu.upper()}"
    summary = "extra time against peak memory, as shares of the step without recomputation"
    body = svg.heading(title, summary)
    body += left_axis(y_axis, PERCENT, "extra time (%)", LEFT, right)
    body += bottom_axis(
        x_axis, SHARE, [n / 10 for n in range(11)], bottom, "peak memory (%)"
    )
    bound = _bound_steps(result, gpu)
    if bound:
        body.append(
            _path(bound, x_axis, y_axis, "#777777", "bound of recomputation", "4 4")
        )
    for method, points in lines.items():
        corners = _steps(points)
        if corners:
            body.append(_path(corners, x_axis, y_axis, OPTIMA[method], method))
        body += [
            svg.element(
                "circle",
                svg.tooltip(f"{method}: {y:+.1%} at {x:.1%}"),
                cx=x_axis.at(x),
                cy=y_axis.at(y),
                r=3,
                fill=OPTIMA[method],
            )
            for x, y in points
        ]
    for index, (method, points) in enumerate(marks.items()):
        body += [
            strategy_mark(
                index, x_axis.at(x), y_axis.at(y), f"{method}: {y:+.1%} at {x:.1%}"
            )
            for x, y in points
            if y <= top
        ]
    entries, below = _legend([*marks], bottom + 62)
    return svg.document(WIDTH, below, title, summary, [*body, *entries])


def _points(result: ModelResult, gpu: str, method: str) -> list[Point]:
    """Return the plans of a method that no other is better than, smallest peak first."""
    plans = sorted(
        (row.peak_bytes / result.baseline_peak_bytes, row.overhead)
        for row in result.rows
        if row.gpu == gpu and row.method == method
        if row.peak_bytes is not None and row.overhead is not None
    )
    best: list[Point] = []
    for x, y in plans:
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def _steps(points: list[Point]) -> list[Point]:
    """Return the corners of the staircase of the least time within each memory."""
    if not points:
        return []
    corners = points[:1]
    for (_, before), (x, y) in pairwise([*points, (1.0, min(points[-1][1], 0.0))]):
        corners += [(x, before), (x, y)]
    return corners


def _bound_steps(result: ModelResult, gpu: str) -> list[Point]:
    """Return the corners of the staircase of the proved bound, by budget."""
    bounds = sorted(
        (row.peak_bytes / result.baseline_peak_bytes, row.bound)
        for row in result.rows
        if row.gpu == gpu and row.method == RECOMPUTE
        if row.peak_bytes is not None and row.bound is not None
    )
    corners = bounds[:1]
    for (x, _), (next_x, bound) in pairwise(bounds):
        corners += [(x, bound), (next_x, bound)]
    return corners


def _path(
    corners: list[Point],
    x_axis: Axis,
    y_axis: Axis,
    colour: str,
    tip: str,
    dash: str | None = None,
) -> str:
    points = (
        f"{svg.number(x_axis.at(x))} {svg.number(y_axis.at(min(y, y_axis.high)))}"
        for x, y in corners
    )
    data = "M" + "L".join(points)
    return svg.path(
        data, "ring", tip, stroke=colour, stroke_width=1.6, stroke_dasharray=dash
    )


def _legend(names: list[str], y: float) -> tuple[list[str], float]:
    """Return the legend, and the y below it."""
    parts: list[str] = []
    x = LEFT
    for method, colour in (*OPTIMA.items(), ("bound of recomputation", "#777777")):
        dash = None if method in OPTIMA else "4 4"
        sample = f"M{svg.number(x)} {svg.number(y - 4)}h20"
        parts.append(
            svg.path(
                sample,
                "ring",
                stroke=colour,
                stroke_width=1.6,
                stroke_dasharray=dash,
            )
        )
        parts.append(svg.text(x + 26, y, method))
        x += 48 + svg.CHARACTER_WIDTH * len(method)
    x, y = LEFT, y + 20
    for index, name in enumerate(names):
        parts += [strategy_mark(index, x + 10, y - 4), svg.text(x + 22, y, name)]
        x += 44 + svg.CHARACTER_WIDTH * len(name)
    return parts, y + 18
