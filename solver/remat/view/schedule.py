"""`schedule_svg`: which operation runs when, and how long its output is live: the matrices R and S
of Checkmate as a picture.

There is one column per run and one row per operation. A dark mark is a run (R); the pale band that
begins there is the time for which an output of that run is live (S). Marks and bands of one role
share one path. Rows are whole pixels high, so that thin ones stay sharp.
"""

from __future__ import annotations

from collections import defaultdict

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.view.drawing import svg
from remat.view.drawing.axes import RUNS, Axis, bottom_axis, decimal_ticks, pass_boundary
from remat.view.drawing.memory_layers import first_backward_run
from remat.view.drawing.schedule_grid import (
    MAX_ROWS,
    ROLES,
    CellStroke,
    ScheduleGrid,
    module_sections,
    schedule_strokes,
)
from remat.view.drawing.text import plain, shorten

TITLE = "Schedule"
MAX_NAMED_ROWS = 46
"""Up to this many rows are labelled with their operation; more are labelled by module."""

LEGEND = ("run", "recomputation", "live", "live-recomputed", "live-result")
"""The roles in the order of the legend."""

_WIDTH, _RIGHT, _TOP = 960.0, 24.0, 88.0
_MAX_ROW_HEIGHT = 15
_LABEL_HEIGHT = 14.0
_MAX_LABEL_LENGTH = 28
_MIN_SIZE = {
    "live-result": (0.0, 0.9),
    "live": (0.0, 0.9),
    "live-recomputed": (2.0, 1.2),
    "run": (1.5, 1.2),
    "recomputation": (3.0, 2.4),
}
"""The smallest width and height in pixels of a stroke of each role, so that a single recomputation
is visible."""


def schedule_svg(plan: PlanData) -> str:
    """Return the picture of a schedule as SVG text: runs from left to right, operations from top to
    bottom."""
    grid = ScheduleGrid(len(plan.graph), len(plan.schedule))
    row_height = max(1, min(_MAX_ROW_HEIGHT, MAX_ROWS // max(grid.rows, 1)))
    bottom = _TOP + max(grid.rows * row_height, 42)
    operation_height = row_height * grid.rows / max(grid.operations, 1)
    labels = row_labels(plan, operation_height, _LABEL_HEIGHT)
    longest = max((len(shorten(plain(name), _MAX_LABEL_LENGTH)) for name, *_ in labels), default=0)
    left = max(60.0, svg.MARGIN + svg.CHARACTER_WIDTH * longest + 10)
    right = _WIDTH - _RIGHT
    x_axis = Axis(0, max(grid.runs, 1), left, right - left)
    body = svg.heading(TITLE, summary(plan))
    body.append(svg.text(svg.MARGIN, _TOP - 12, "operations"))
    for name, first, after in labels:
        y = _TOP + grid.row(first) * row_height
        below = _TOP + (grid.row(after - 1) + 1) * row_height
        if grid.operations > MAX_NAMED_ROWS:
            body.append(svg.line(left - 4, y, right, y, "grid"))
        label = shorten(plain(name), _MAX_LABEL_LENGTH)
        body.append(svg.text(left - 8, (y + below) / 2 + 4, label, anchor="end", tip=name))
    strokes_by_role = schedule_strokes(plan, grid)
    column_width = x_axis.length / max(grid.columns, 1)
    for role, strokes in strokes_by_role.items():
        min_width, min_height = _MIN_SIZE[role]
        stroke_width = row_height * (0.8 if grid.operations <= MAX_NAMED_ROWS else 1)
        data = _strokes_path(strokes, left, column_width, min_width, row_height)
        body.append(svg.path(data, role, ROLES[role], stroke_width=max(stroke_width, min_height)))
    boundary = first_backward_run(plan)
    if boundary is not None:
        body += pass_boundary(x_axis.at(boundary), left, right, _TOP, bottom)
    ticks = [tick for tick in decimal_ticks(0, max(grid.runs, 1)) if tick == int(tick)]
    body += bottom_axis(x_axis, RUNS, ticks, bottom, "runs")
    if grid.rows == grid.operations:
        body += _tips(plan, left, row_height)
    entries = [(role, ROLES[role]) for role in LEGEND if role in strokes_by_role]
    legend, below = svg.legend(entries, left, bottom + 62, _WIDTH - left)
    return svg.document(_WIDTH, below, TITLE, summary(plan), [*body, *legend])


def row_labels(
    plan: PlanData, operation_height: float, label_height: float
) -> list[tuple[str, int, int]]:
    """Return the labels of the rows: (text, first operation, last operation plus one). Up to
    `MAX_NAMED_ROWS` operations are named one by one, more by sections of one module."""
    operations = plan.graph.operations
    if len(operations) <= MAX_NAMED_ROWS:
        return [(operation.name, op, op + 1) for op, operation in enumerate(operations)]
    return module_sections(plan, operation_height, label_height)


def _strokes_path(
    strokes: list[CellStroke],
    left: float,
    column_width: float,
    min_width: float,
    row_height: int,
) -> str:
    """Return path data with a horizontal line for each stroke: lines take the fewest characters."""
    parts: list[str] = []
    for row, first, last in strokes:
        x, y = left + first * column_width, _TOP + (row + 0.5) * row_height
        width = max((last - first + 1) * column_width, min_width)
        parts.append(f"M{svg.number(round(x, 1))} {svg.number(y)}h{svg.number(round(width, 1))}")
    return "".join(parts)


def _tips(plan: PlanData, left: float, row_height: int) -> list[str]:
    """Return invisible rows whose tooltips describe their operation. They need one row each."""
    runs: dict[int, list[int]] = defaultdict(list)
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    parts: list[str] = []
    for op, operation in enumerate(plan.graph.operations):
        size = sum(plan.graph.values[v].size_bytes for v in operation.outputs)
        module = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        numbers = ", ".join(map(str, runs[op][:8])) + (", …" if len(runs[op]) > 8 else "")
        tip = (
            f"{shorten(plain(operation.name), 60)}{module}: runs at {numbers}; "
            f"{format_seconds(operation.cost_s)}, {format_bytes(size)}"
        )
        width = _WIDTH - left - _RIGHT
        parts.append(svg.rectangle(left, _TOP + op * row_height, width, row_height, "hover", tip))
    return parts


def summary(plan: PlanData) -> str:
    """Return the numbers of runs, operations and recomputations, as text."""
    recomputed = plan.schedule.recomputed(plan.graph)
    return (
        f"{len(plan.schedule):,} runs of {len(plan.graph):,} operations; {len(recomputed):,} "
        f"operations are recomputed, {sum(recomputed.values()):,} times in all"
    )
