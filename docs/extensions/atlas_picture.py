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

from remat.view.picture import (
    PERCENT,
    Item,
    LegendEntry,
    Line,
    Mark,
    Panel,
    Picture,
    Scale,
    strategy_mark,
)
from remat.view.svg import picture_svg

WIDTH, HEIGHT = 760.0, 300.0
BOUND = "bound of recomputation"
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
    items: list[Item] = []
    bound = Line(
        "ring",
        [(x, min(y, top)) for x, y in _bound_steps(result, gpu)],
        BOUND,
        is_dashed=True,
        colour="#777777",
    )
    if bound.points:
        items.append(bound)
    legend = [LegendEntry(BOUND, line=bound)]
    for number, (method, points) in enumerate(lines.items()):
        corners = [(x, min(y, top)) for x, y in _steps(points)]
        line = Line("ring", corners, method, colour=OPTIMA[method])
        legend.insert(number, LegendEntry(method, line=line))
        if corners:
            items.append(line)
        items += [
            Mark(
                x,
                y,
                3,
                f"{method}: {y:+.1%} at {x:.1%}",
                "dot",
                colour=OPTIMA[method],
            )
            for x, y in points
        ]
    for index, (method, points) in enumerate(marks.items()):
        legend.append(LegendEntry(method, mark=strategy_mark(index, 0, 0)))
        items += [
            strategy_mark(index, x, y, f"{method}: {y:+.1%} at {x:.1%}")
            for x, y in points
            if y <= top
        ]
    return picture_svg(
        Picture(
            f"{result.title} on {gpu.upper()}",
            "extra time against peak memory, as shares of the step without recomputation",
            x=Scale(0.0, 1.03, PERCENT, "peak memory (%)"),
            panels=[
                Panel(Scale(0.0, top, PERCENT, "extra time (%)"), HEIGHT, items)
            ],
            legend=legend,
            width=WIDTH,
        )
    )


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
