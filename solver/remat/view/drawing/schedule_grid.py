"""The schedule picture as a grid of cells: which operation runs when, and when its output is live.

A row is an operation, or all pieces of one, and a column a run. If there are too many for the
picture, a row or column is a bin of several, and a cell is filled if anything in its bin is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.graph import Operation
from remat.plan_data import PlanData
from remat.report.operation_lines import lines_of_operations
from remat.view.drawing.memory_layers import copy_layers, earlier_run_counts

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
        """Return the row of a line."""
        return line * self.rows // len(self.lines)

    def rows_of_operations(self) -> list[int]:
        """Return the row of each operation."""
        rows = {op: self.row(line) for line, ops in enumerate(self.lines) for op in ops}
        return [rows[op] for op in range(len(rows))]

    def column(self, run: int) -> int:
        """Return the column of a run."""
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
    for copy, layer in zip(timeline.copies, copy_layers(plan, timeline), strict=True):
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
    """Yield (first, last) of each maximal range of consecutive numbers."""
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
    """Return the sections by the first `depth` parts of the module paths; none spans both passes.
    An operation of an enclosing module, or of none, belongs to the section that it interrupts."""
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
