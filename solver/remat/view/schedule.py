"""`schedule_svg`: what runs when and what is held when: the R and S of Checkmate as a picture.

One column a run, one row an operation. A dark mark is a run (R); the pale band that begins at it is
the time for which an output of that run is held (S). Marks and bands of one kind share one path.
Rows are whole pixels high, so that thin ones stay sharp.
"""

from __future__ import annotations

from collections import defaultdict

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.view.drawing import svg
from remat.view.drawing.axes import RUNS, Axis, bottom_axis, decimal_ticks, passes
from remat.view.drawing.cells import MAX_ROWS, ROLES, Grid, Stroke, sections, strokes
from remat.view.drawing.occupancy import backward_run
from remat.view.drawing.text import plain, shorten

TITLE = "Schedule"
NAMED = 46
"""Up to this many rows carry their operation's name; more are labelled by module."""

LEGEND = ("run", "rerun", "held", "held-again", "held-result")
_WIDTH, _RIGHT, _TOP = 960.0, 24.0, 88.0
_ROW = 15
_LABEL = 14.0
"""Pixels that a label needs."""

_LETTERS = 28
_LEAST = {
    "held-result": (0.0, 0.9),
    "held": (0.0, 0.9),
    "held-again": (2.0, 1.2),
    "run": (1.5, 1.2),
    "rerun": (3.0, 2.4),
}
"""Width and height in pixels below which nothing is drawn: what is rare is the point of the
picture, and is drawn no smaller than can be seen."""


def schedule_svg(plan: PlanData) -> str:
    """The picture as SVG text: runs from left to right, operations from top to bottom."""
    grid = Grid(len(plan.graph), len(plan.schedule))
    cell = max(1, min(_ROW, MAX_ROWS // max(grid.rows, 1)))
    bottom = _TOP + max(grid.rows * cell, 42)
    labels = row_labels(plan, cell * grid.rows / max(grid.operations, 1), _LABEL)
    longest = max((len(shorten(plain(name), _LETTERS)) for name, *_ in labels), default=0)
    left = max(60.0, svg.MARGIN + svg.CHARACTER_WIDTH * longest + 10)
    right = _WIDTH - _RIGHT
    across = Axis(0, max(grid.runs, 1), left, right - left)
    body = svg.heading(TITLE, summary(plan))
    body.append(svg.text(svg.MARGIN, _TOP - 12, "operations"))
    for name, first, after in labels:
        y, below = _TOP + grid.row(first) * cell, _TOP + (grid.row(after - 1) + 1) * cell
        if grid.operations > NAMED:
            body.append(svg.line(left - 4, y, right, y, "grid"))
        short = shorten(plain(name), _LETTERS)
        body.append(svg.text(left - 8, (y + below) / 2 + 4, short, anchor="end", tip=name))
    found = strokes(plan, grid)
    wide = across.length / max(grid.columns, 1)
    for role, cells in found.items():
        least, low = _LEAST[role]
        pen = max(cell * (0.8 if grid.operations <= NAMED else 1), low)
        shape = _shape(cells, left, wide, least, cell)
        body.append(svg.path(shape, role, ROLES[role], stroke_width=pen))
    boundary = backward_run(plan)
    if boundary is not None:
        body += passes(across.at(boundary), left, right, _TOP, bottom)
    ticks = [tick for tick in decimal_ticks(0, max(grid.runs, 1)) if tick == int(tick)]
    body += bottom_axis(across, RUNS, ticks, bottom, "runs")
    if grid.rows == grid.operations:
        body += _tips(plan, left, cell)
    entries = [(role, ROLES[role]) for role in LEGEND if role in found]
    marks, below = svg.legend(entries, left, bottom + 62, _WIDTH - left)
    return svg.document(_WIDTH, below, TITLE, summary(plan), [*body, *marks])


def row_labels(plan: PlanData, height: float, label: float) -> list[tuple[str, int, int]]:
    """(name, first operation, the one after the last): operations by name where there are few,
    else stretches of rows by module. An operation is `height` high, a label `label`."""
    operations = plan.graph.operations
    if len(operations) <= NAMED:
        return [(operation.name, op, op + 1) for op, operation in enumerate(operations)]
    return sections(plan, height, label)


def _shape(cells: list[Stroke], left: float, wide: float, least: float, cell: int) -> str:
    """A horizontal line for each stretch of cells: strokes take the fewest characters."""
    parts: list[str] = []
    for row, first, last in cells:
        x, y = left + first * wide, _TOP + (row + 0.5) * cell
        width = max((last - first + 1) * wide, least)
        parts.append(f"M{svg.number(round(x, 1))} {svg.number(y)}h{svg.number(round(width, 1))}")
    return "".join(parts)


def _tips(plan: PlanData, left: float, cell: int) -> list[str]:
    """Invisible rows that say what the operation is; in a binned picture there is no such row."""
    runs: dict[int, list[int]] = defaultdict(list)
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    parts: list[str] = []
    for op, operation in enumerate(plan.graph.operations):
        size = sum(plan.graph.values[v].size_bytes for v in operation.outputs)
        where = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        when = ", ".join(map(str, runs[op][:8])) + (", …" if len(runs[op]) > 8 else "")
        words = (
            f"{shorten(plain(operation.name), 60)}{where}: runs at {when}; "
            f"{format_seconds(operation.cost_s)}, {format_bytes(size)}"
        )
        width = _WIDTH - left - _RIGHT
        parts.append(svg.rectangle(left, _TOP + op * cell, width, cell, "hover", words))
    return parts


def summary(plan: PlanData) -> str:
    """Runs, operations, and how much of it is recomputation."""
    again = plan.schedule.recomputed(plan.graph)
    return (
        f"{len(plan.schedule):,} runs of {len(plan.graph):,} operations; {len(again):,} operations "
        f"run again, {sum(again.values()):,} times in all"
    )
