"""Which operation runs when, and how long its output is live: the matrices R and S of Checkmate as
a picture.

There is one column per run, and one row per operation or for all pieces of one. A dark mark is a
run (R); the pale band that begins there is the time for which an output of that run is live (S). If
there are too many for the picture, a row or column is a bin of several, and a cell is filled if
anything in its bin is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.graph import Operation
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import count_without_offload_copies
from remat.plan_data import PlanData
from remat.report.operation_lines import lines_of_operations, operation_labels
from remat.view.memory import earlier_run_counts, first_backward_run, value_copy_layers
from remat.view.picture import (
    RUNS,
    Box,
    Item,
    LegendEntry,
    Panel,
    Picture,
    RowLabel,
    Rule,
    Scale,
    Strokes,
)
from remat.view.text import plain_text, shorten_name

MAX_ROWS = 700
MAX_COLUMNS = 900

ROLES = {
    "live-result": "result live to the end",
    "live": "output live",
    "live-recomputed": "recomputed output live",
    "run": "first run",
    "recomputation": "recomputation",
}
"""The roles that a cell can have, with their labels. Later roles are drawn over earlier ones."""

_ROLE_OF_LAYER = {
    "activations": "live",
    "activation-gradients": "live",
    "results": "live-result",
    "recomputed": "live-recomputed",
    "reloaded": "live",
}
"""The role of the cells in which a copy of this memory layer is live."""

_MAX_DEPTH = 8
"""The largest number of parts of a module path in a label."""

CellStroke = tuple[int, int, int]
"""A horizontal stretch of filled cells: its row, first column and last column."""

ModuleSection = tuple[str, int, int]
"""Consecutive operations of one module: its path, the first operation, and the last plus one."""

MAX_NAMED_ROWS = 46
"""Up to this many rows are labelled with their operation; more are labelled by module."""

_LEGEND = ("run", "recomputation", "live", "live-recomputed", "live-result")
"""The roles in the order of the legend."""

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


def schedule_picture(plan: PlanData) -> Picture:
    """Return the picture of a schedule: runs from left to right, operations from top to bottom.
    Rows are whole pixels high, so that thin ones stay sharp."""
    grid = ScheduleGrid.of(plan)
    rows, count = max(grid.rows, 1), len(grid.lines)
    row_height = max(1, min(_MAX_ROW_HEIGHT, MAX_ROWS // rows))
    runs_per_column = grid.runs / max(grid.columns, 1)
    is_named = count <= MAX_NAMED_ROWS
    strokes_by_role = schedule_strokes(plan, grid)
    items: list[Item] = [
        Strokes(
            role,
            [
                (row + 0.5, first * runs_per_column, (last + 1) * runs_per_column)
                for row, first, last in strokes
            ],
            0.8 if is_named else 1.0,
            *_MIN_SIZE[role],
            ROLES[role],
        )
        for role, strokes in strokes_by_role.items()
    ]
    boundary = first_backward_run(plan)
    if boundary is not None:
        items.append(Rule("mark", "x", boundary, "backward", "forward"))
    if grid.rows == count:
        items += _row_tooltips(plan, grid)
    labels = [
        RowLabel(
            shorten_name(plain_text(name), _MAX_LABEL_LENGTH),
            grid.row(first),
            grid.row(after - 1) + 1,
            name,
        )
        for name, first, after in _row_labels(plan, grid, row_height * grid.rows / max(count, 1))
    ]
    height = max(grid.rows * row_height, 42)
    operations = Panel(Scale(rows, 0, name="operations"), height, items, labels, not is_named)
    return Picture(
        "Schedule",
        _schedule_summary(plan),
        x=Scale(0, max(grid.runs, 1), RUNS, "runs"),
        panels=[operations],
        legend=[LegendEntry(ROLES[role], role) for role in _LEGEND if role in strokes_by_role],
    )


def _row_labels(plan: PlanData, grid: ScheduleGrid, line_height: float) -> list[ModuleSection]:
    """Return the labels of the lines of operations: up to `MAX_NAMED_ROWS` are named one by one,
    more by sections of one module."""
    if len(grid.lines) <= MAX_NAMED_ROWS:
        labels = operation_labels(plan.graph)
        return [(labels[ops[0]], line, line + 1) for line, ops in enumerate(grid.lines)]
    first_operations = [plan.graph.operations[ops[0]] for ops in grid.lines]
    return module_sections(first_operations, line_height, _LABEL_HEIGHT)


def _row_tooltips(plan: PlanData, grid: ScheduleGrid) -> Iterator[Box]:
    """Yield an invisible box for each line of operations, whose tooltip describes it. `grid` must
    have a row for each line."""
    graph, labels = plan.graph, operation_labels(plan.graph)
    runs: dict[int, list[int]] = defaultdict(list)
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    for line, ops in enumerate(grid.lines):
        operations = [graph.operations[op] for op in ops]
        size = sum(graph.values[v].size_bytes for o in operations for v in o.outputs)
        module = (
            f" in {shorten_name(plain_text(operations[0].module), 60)}"
            if operations[0].module
            else ""
        )
        line_runs = sorted(run for op in ops for run in runs[op])
        numbers = ", ".join(map(str, line_runs[:8])) + (", …" if len(line_runs) > 8 else "")
        tip = (
            f"{shorten_name(plain_text(labels[ops[0]]), 60)}{module}: runs at {numbers}; "
            f"{format_seconds(sum(o.cost_s for o in operations))}, {format_bytes(size)}"
        )
        yield Box("hover", 0, grid.runs, line, line + 1, tip)


def _schedule_summary(plan: PlanData) -> str:
    """Return the numbers of runs, operations and recomputations, as text."""
    recomputed = plan.schedule.recomputed(plan.graph)
    copy_count = len(plan.graph) - count_without_offload_copies(plan.graph)
    copies = f" ({copy_count:,} of them for copies)" if copy_count else ""
    return (
        f"{len(plan.schedule):,} runs of {len(plan.graph):,} operations{copies}; "
        f"{len(recomputed):,} operations are recomputed, {sum(recomputed.values()):,} times in all"
    )


@dataclass(frozen=True, slots=True)
class ScheduleGrid:
    """The lines of operations and the runs, and the rows and columns that they are drawn in. The
    pieces of an operation share a line: `lines` has the operations on each."""

    lines: tuple[tuple[int, ...], ...]
    runs: int

    @classmethod
    def of(cls, plan: PlanData) -> ScheduleGrid:
        """Return the grid of a plan."""
        lines = lines_of_operations(plan.graph).values()
        return cls(tuple(map(tuple, lines)), len(plan.schedule))

    @property
    def rows(self) -> int:
        """The number of rows of the picture."""
        return min(len(self.lines), MAX_ROWS)

    @property
    def columns(self) -> int:
        """The number of columns of the picture."""
        return min(self.runs, MAX_COLUMNS)

    def row(self, line: int) -> int:
        """Return the row in which a line of operations is drawn."""
        return line * self.rows // len(self.lines)

    def rows_of_operations(self) -> list[int]:
        """Return the row of each operation."""
        rows = {op: self.row(line) for line, ops in enumerate(self.lines) for op in ops}
        return [rows[op] for op in range(len(rows))]

    def column(self, run: int) -> int:
        """Return the column in which a run is drawn."""
        return run * self.columns // self.runs


def schedule_strokes(plan: PlanData, grid: ScheduleGrid) -> dict[str, list[CellStroke]]:
    """Return the filled cells of each role as horizontal strokes, row by row. Roles are in drawing
    order; those without cells are left out."""
    filled: dict[str, dict[int, set[int]]] = {role: defaultdict(set) for role in ROLES}
    rows_of_operations = grid.rows_of_operations()
    earlier_runs = earlier_run_counts(plan.schedule)
    for run, (op, earlier) in enumerate(zip(plan.schedule.runs, earlier_runs, strict=True)):
        filled["recomputation" if earlier else "run"][rows_of_operations[op]].add(grid.column(run))
    timeline = plan.timeline()
    for copy, layer in zip(timeline.copies, value_copy_layers(plan, timeline), strict=True):
        # A copy is live from the run that produces it to the last one that reads it.
        last = min(copy.end, grid.runs - 1)
        if last > copy.start and plan.graph.values[copy.value].size_bytes:
            columns = range(grid.column(copy.start), grid.column(last) + 1)
            row = rows_of_operations[plan.graph.producer[copy.value]]
            filled[_ROLE_OF_LAYER[layer]][row].update(columns)
    return {
        role: [(row, *ends) for row in sorted(rows) for ends in _consecutive_ranges(rows[row])]
        for role, rows in filled.items()
        if rows
    }


def _consecutive_ranges(numbers: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each maximal range of consecutive numbers. `numbers` must not be
    empty."""
    first, *others = sorted(numbers)
    previous = first
    for number in others:
        if number != previous + 1:
            yield first, previous
            first = number
        previous = number
    yield first, previous


def module_sections(
    operations: Sequence[Operation], operation_height: float, label_height: float
) -> list[ModuleSection]:
    """Return the sections of these operations that get a label with their module's path.

    Paths are cut to the depth at which sections that are high enough for a label cover the most
    operations. If there are fewer than four such sections, lower ones are labelled too, as far as
    labels do not overlap.
    """
    for min_height in (label_height, label_height / 4, label_height / 8):
        best: list[ModuleSection] = []
        best_covered = 0
        for depth in range(_MAX_DEPTH, 0, -1):
            sections = [
                (module, first, after)
                for module, first, after in _sections_at_depth(operations, depth)
                if (after - first) * operation_height >= min_height
            ]
            covered = sum(after - first for _, first, after in sections)
            # Of paths that distinguish equally many sections, the shorter ones are better names.
            if covered > 1.15 * best_covered or (
                covered >= best_covered and len(sections) >= len(best)
            ):
                best, best_covered = sections, covered
        if len(best) >= 4:
            break
    labelled: list[ModuleSection] = []
    for section in best:
        # The sum of the ends is twice the middle.
        distance = (sum(section[1:]) - sum(labelled[-1][1:])) / 2 if labelled else 0
        if not labelled or distance * operation_height >= label_height:
            labelled.append(section)
    return labelled


def _sections_at_depth(operations: Sequence[Operation], depth: int) -> list[ModuleSection]:
    """Return the sections by the first `depth` parts of the module paths; none spans both forward
    and backward. An operation of an enclosing module, or of none, belongs to the section that it
    interrupts."""
    sections: list[ModuleSection] = []
    was_backward = False
    for op, operation in enumerate(operations):
        name = ".".join(operation.module.split(".")[:depth])
        last = sections[-1][0] if sections and operation.backward == was_backward else None
        is_enclosing = last is not None and (not name or f"{last}.".startswith(f"{name}."))
        if last is not None and is_enclosing:
            sections[-1] = (last, sections[-1][1], op + 1)
        else:
            sections.append((name, op, op + 1))
        was_backward = operation.backward
    return [section for section in sections if section[0]]
