"""`schedule_svg`: which operation runs when, and how long its output is live: the matrices R and S
of Checkmate as a picture.

There is one column per run and one row per operation. A dark mark is a run (R); the pale band that
begins there is the time for which an output of that run is live (S). Marks and bands of one role
share one path. Rows are whole pixels high, so that thin ones stay sharp.
"""

from __future__ import annotations

from collections import defaultdict

from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import count_without_copies
from remat.plan_data import PlanData
from remat.report.operation_lines import operation_labels
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
    grid = ScheduleGrid.of(plan)
    row_height = max(1, min(_MAX_ROW_HEIGHT, MAX_ROWS // max(grid.rows, 1)))
    bottom = _TOP + max(grid.rows * row_height, 42)
    line_height = row_height * grid.rows / max(len(grid.lines), 1)
    labels = row_labels(plan, grid, line_height, _LABEL_HEIGHT)
    longest = max((len(shorten(plain(name), _MAX_LABEL_LENGTH)) for name, *_ in labels), default=0)
    left = max(60.0, svg.MARGIN + svg.CHARACTER_WIDTH * longest + 10)
    right = _WIDTH - _RIGHT
    x_axis = Axis(0, max(grid.runs, 1), left, right - left)
    body = svg.heading(TITLE, summary(plan))
    body.append(svg.text(svg.MARGIN, _TOP - 12, "operations"))
    for name, first, after in labels:
        y = _TOP + grid.row(first) * row_height
        below = _TOP + (grid.row(after - 1) + 1) * row_height
        if len(grid.lines) > MAX_NAMED_ROWS:
            body.append(svg.line(left - 4, y, right, y, "grid"))
        label = shorten(plain(name), _MAX_LABEL_LENGTH)
        body.append(svg.text(left - 8, (y + below) / 2 + 4, label, anchor="end", tip=name))
    strokes_by_role = schedule_strokes(plan, grid)
    column_width = x_axis.length / max(grid.columns, 1)
    for role, strokes in strokes_by_role.items():
        min_width, min_height = _MIN_SIZE[role]
        stroke_width = row_height * (0.8 if len(grid.lines) <= MAX_NAMED_ROWS else 1)
        data = _strokes_path(strokes, left, column_width, min_width, row_height)
        body.append(svg.path(data, role, ROLES[role], stroke_width=max(stroke_width, min_height)))
    boundary = first_backward_run(plan)
    if boundary is not None:
        body += pass_boundary(x_axis.at(boundary), left, right, _TOP, bottom)
    ticks = [tick for tick in decimal_ticks(0, max(grid.runs, 1)) if tick == int(tick)]
    body += bottom_axis(x_axis, RUNS, ticks, bottom, "runs")
    if grid.rows == len(grid.lines):
        body += _tips(plan, grid, left, row_height)
    entries = [(role, ROLES[role]) for role in LEGEND if role in strokes_by_role]
    legend, below = svg.legend(entries, left, bottom + 62, _WIDTH - left)
    return svg.document(_WIDTH, below, TITLE, summary(plan), [*body, *legend])


def row_labels(
    plan: PlanData, grid: ScheduleGrid, line_height: float, label_height: float
) -> list[tuple[str, int, int]]:
    """Return the labels of the rows: (text, first line, last line plus one). Up to
    `MAX_NAMED_ROWS` lines are named one by one, more by sections of one module."""
    if len(grid.lines) <= MAX_NAMED_ROWS:
        labels = operation_labels(plan.graph)
        return [(labels[ops[0]], line, line + 1) for line, ops in enumerate(grid.lines)]
    first_operations = [plan.graph.operations[ops[0]] for ops in grid.lines]
    return module_sections(first_operations, line_height, label_height)


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


def _tips(plan: PlanData, grid: ScheduleGrid, left: float, row_height: int) -> list[str]:
    """Return invisible rows whose tooltips describe their line. They need one row each."""
    graph, labels = plan.graph, operation_labels(plan.graph)
    runs: dict[int, list[int]] = defaultdict(list)
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    parts: list[str] = []
    for line, ops in enumerate(grid.lines):
        operations = [graph.operations[op] for op in ops]
        size = sum(graph.values[v].size_bytes for o in operations for v in o.outputs)
        module = f" in {shorten(plain(operations[0].module), 60)}" if operations[0].module else ""
        line_runs = sorted(run for op in ops for run in runs[op])
        numbers = ", ".join(map(str, line_runs[:8])) + (", …" if len(line_runs) > 8 else "")
        tip = (
            f"{shorten(plain(labels[ops[0]]), 60)}{module}: runs at {numbers}; "
            f"{format_seconds(sum(o.cost_s for o in operations))}, {format_bytes(size)}"
        )
        width = _WIDTH - left - _RIGHT
        parts.append(svg.rectangle(left, _TOP + line * row_height, width, row_height, "hover", tip))
    return parts


def summary(plan: PlanData) -> str:
    """Return the numbers of runs, operations and recomputations, as text."""
    recomputed = plan.schedule.recomputed(plan.graph)
    copy_count = len(plan.graph) - count_without_copies(plan.graph)
    copies = f" ({copy_count:,} of them for copies)" if copy_count else ""
    return (
        f"{len(plan.schedule):,} runs of {len(plan.graph):,} operations{copies}; "
        f"{len(recomputed):,} operations are recomputed, {sum(recomputed.values()):,} times in all"
    )
