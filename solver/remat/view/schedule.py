"""`schedule_svg`: what runs when and what is held when: the R and S of Checkmate as a picture.

One column a run, one row an operation. A dark mark is a run (R); the pale band that begins at it is
the time for which an output of that run is held (S). Marks and bands of one kind share one path.
Long schedules are binned, at most 900 columns and 800 rows; a bin that anything touches is filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from remat.budget import format_bytes, format_seconds
from remat.plan import Plan
from remat.view import svg
from remat.view.axes import Axis, bottom_axis, decimal_ticks, tick_count
from remat.view.occupancy import backward_run, copy_kinds, reruns
from remat.view.text import plain, shorten

MAX_ROWS = 800
MAX_COLUMNS = 900
_LEFT, _RIGHT, _TOP = 190.0, 14.0, 56.0
_WIDTH = 960.0
_NAMES = 48
"""Up to this many rows carry their operation's name; more are labelled by module."""

_LABEL = 12.0
"""Pixels that a label needs."""

_BAND = {"kept": "held", "passing": "held", "results": "held-result", "again": "held-again"}
_LEAST = {
    "run": (1.5, 1.2),
    "rerun": (3.0, 2.4),
    "held": (0.0, 0.9),
    "held-again": (2.0, 1.2),
    "held-result": (0.0, 0.9),
}
"""Width and height in pixels below which nothing is drawn."""

_WORDS = {
    "run": "runs",
    "rerun": "runs again",
    "held": "output held",
    "held-again": "recomputed output held",
    "held-result": "result held to the end",
}


def schedule_svg(plan: Plan) -> str:
    """The picture as SVG text: runs from left to right, operations from top to bottom."""
    count, runs = len(plan.graph), len(plan.schedule)
    rows, columns = min(count, MAX_ROWS), min(runs, MAX_COLUMNS)
    height = min(max(rows * 14.0, 42.0), 700.0)
    across = Axis(0, max(runs, 1), _LEFT, _WIDTH - _LEFT - _RIGHT)
    grid = _Grid(count, runs, rows, columns, height)
    body = [
        svg.text(_LEFT, 24, "Schedule", role="title"),
        svg.text(_LEFT, 42, _summary(plan)),
        *_labels(plan, grid),
    ]
    used: list[str] = []
    cells = _bands(plan, grid) | _marks(plan, grid)
    for role in ("held-result", "held", "held-again", "run", "rerun"):
        if cells.get(role):
            used.append(role)
            body.append(
                svg.path(
                    grid.shape(cells[role], role), role, _WORDS[role], stroke_width=grid.pen(role)
                )
            )
    start = backward_run(plan)
    if start is not None:
        x = across.at(start)
        body.append(svg.line(x, _TOP - 6, x, _TOP + height, "mark", dash="2 4"))
    ticks = [tick for tick in decimal_ticks(0, max(runs, 1)) if tick == int(tick)]
    body += bottom_axis(across, ticks, tick_count, _TOP + height, "runs")
    body += _tips(plan, grid)
    marks, bottom = svg.legend(
        [(role, words) for role, words in _WORDS.items() if role in used],
        _LEFT,
        _TOP + height + 56,
        _WIDTH - _LEFT,
    )
    return svg.document(_WIDTH, bottom, "Schedule", _summary(plan), [*body, *marks])


class _Grid:
    """Operations and runs in rows and columns of pixels."""

    def __init__(self, count: int, runs: int, rows: int, columns: int, height: float) -> None:
        self.count, self.runs, self.rows, self.columns = count, runs, rows, columns
        self.height = height
        self.cell_height = height / max(rows, 1)
        self.cell_width = (_WIDTH - _LEFT - _RIGHT) / max(columns, 1)

    def row(self, op: int) -> int:
        return op * self.rows // self.count

    def column(self, run: int) -> int:
        return run * self.columns // self.runs

    def y(self, op: int) -> float:
        return _TOP + self.row(op) * self.cell_height

    def pen(self, role: str) -> float:
        """Runs and bands are strokes, as wide as a row: they take the fewest characters. What is
        rare is the point of the picture, and is drawn no smaller than can be seen."""
        return max(self.cell_height * (0.8 if self.rows <= _NAMES else 1), _LEAST[role][1])

    def shape(self, cells: dict[int, set[int]], role: str) -> str:
        """A horizontal stroke for each stretch of cells in a row."""
        least = _LEAST[role][0]
        parts: list[str] = []
        for row in sorted(cells):
            y = svg.number(_TOP + (row + 0.5) * self.cell_height)
            for first, last in _stretches(sorted(cells[row])):
                width = max((last - first + 1) * self.cell_width, least)
                x = _LEFT + first * self.cell_width
                parts.append(f"M{svg.number(round(x, 1))} {y}h{svg.number(round(width, 1))}")
        return "".join(parts)


def _stretches(cells: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = previous = cells[0]
    for cell in cells[1:]:
        if cell != previous + 1:
            yield first, previous
            first = cell
        previous = cell
    yield first, previous


def _marks(plan: Plan, grid: _Grid) -> dict[str, dict[int, set[int]]]:
    found: dict[str, dict[int, set[int]]] = {"run": defaultdict(set), "rerun": defaultdict(set)}
    for run, (op, before) in enumerate(zip(plan.schedule.runs, reruns(plan.schedule), strict=True)):
        found["rerun" if before else "run"][grid.row(op)].add(grid.column(run))
    return found


def _bands(plan: Plan, grid: _Grid) -> dict[str, dict[int, set[int]]]:
    """Cells from the run that made the copy to the last one that reads it."""
    found: dict[str, dict[int, set[int]]] = {band: defaultdict(set) for band in _BAND.values()}
    timeline = plan.timeline()
    for copy, kind in zip(timeline.copies, copy_kinds(plan, timeline), strict=True):
        if copy.end > copy.start and plan.graph.values[copy.value].size_bytes:
            last = min(copy.end, grid.runs - 1)
            cells = range(grid.column(copy.start), grid.column(last) + 1)
            found[_BAND[kind]][grid.row(plan.graph.producer[copy.value])].update(cells)
    return found


def _labels(plan: Plan, grid: _Grid) -> list[str]:
    """Operations by name where there is room, else stretches of rows by module."""
    operations = plan.graph.operations
    if grid.count <= _NAMES:
        return [
            svg.text(
                _LEFT - 8,
                grid.y(op) + grid.cell_height / 2 + 4,
                shorten(plain(operation.name), 28),
                anchor="end",
                tip=operation.name,
            )
            for op, operation in enumerate(operations)
        ]
    parts: list[str] = []
    for name, first, after in _sections(plan, grid):
        y, below = grid.y(first), _TOP + grid.row(after - 1) * grid.cell_height + grid.cell_height
        parts.append(svg.line(_LEFT - 4, y, _WIDTH - _RIGHT, y, "grid"))
        parts.append(
            svg.text(
                _LEFT - 8,
                (y + below) / 2 + 4,
                shorten(plain(name), 28),
                anchor="end",
                tip=name,
            )
        )
    return parts


def _sections(plan: Plan, grid: _Grid) -> list[tuple[str, int, int]]:
    """Stretches of operations (module, first, after) of one module that get a label: at the depth
    at which most of the rows belong to a stretch high enough for one, or else at which as many
    labels as there is room for name some of many low ones."""
    height = grid.height / max(grid.count, 1)
    for low in (_LABEL, 3.0):
        best: list[tuple[str, int, int]] = []
        covered = 0
        for depth in range(4, 0, -1):
            found = [s for s in _stretches_at(plan, depth) if (s[2] - s[1]) * height >= low]
            share = sum(after - first for _, first, after in found)
            if share > 1.15 * covered:
                best, covered = found, share
        if len(best) >= 4:
            break
    shown: list[tuple[str, int, int]] = []
    for section in best:
        apart = sum(section[1:]) - sum(shown[-1][1:]) if shown else 0  # twice, between middles
        if not shown or apart / 2 * height >= _LABEL:
            shown.append(section)
    return shown


def _stretches_at(plan: Plan, depth: int) -> list[tuple[str, int, int]]:
    """Stretches with a module path of at most `depth` parts, each within one pass. Operations of a
    module around it, or of none, belong to the stretch that they interrupt."""
    found: list[tuple[str, int, int]] = []
    backward = False
    for op, operation in enumerate(plan.graph.operations):
        name = ".".join(operation.module.split(".")[:depth])
        last = found[-1][0] if found and operation.backward == backward else None
        inside = last is not None and (not name or f"{last}.".startswith(f"{name}."))
        if last is not None and inside:
            found[-1] = (last, found[-1][1], op + 1)
        else:
            found.append((name, op, op + 1))
        backward = operation.backward
    return [stretch for stretch in found if stretch[0]]


def _tips(plan: Plan, grid: _Grid) -> list[str]:
    """Invisible rows that say what the operation is; in a binned picture there is no such row."""
    if grid.rows < grid.count:
        return []
    runs: dict[int, list[int]] = defaultdict(list)
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    parts: list[str] = []
    for op, operation in enumerate(plan.graph.operations):
        size = sum(plan.graph.values[v].size_bytes for v in operation.outputs)
        where = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        when = ", ".join(map(str, runs[op][:8])) + (", …" if len(runs[op]) > 8 else "")
        parts.append(
            svg.rectangle(
                _LEFT,
                grid.y(op),
                _WIDTH - _LEFT - _RIGHT,
                grid.cell_height,
                "hover",
                f"{shorten(plain(operation.name), 60)}{where}: runs at {when}; "
                f"{format_seconds(operation.cost_s)}, {format_bytes(size)}",
            )
        )
    return parts


def _summary(plan: Plan) -> str:
    again = plan.schedule.recomputed(plan.graph)
    return (
        f"{len(plan.schedule):,} runs of {len(plan.graph):,} operations; {len(again):,} operations "
        f"run again, {sum(again.values()):,} times in all"
    )
