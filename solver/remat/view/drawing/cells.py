"""The cells of the schedule picture: what runs when, and what is held when, in rows and columns.

A row is an operation and a column a run, or a bin of several where there are more than the picture
has room for; a bin that anything touches is filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from remat.plan_data import PlanData
from remat.view.drawing.occupancy import copy_kinds, reruns

MAX_ROWS = 700
MAX_COLUMNS = 900

ROLES = {
    "held-result": "result held to the end",
    "held": "output held",
    "held-again": "recomputed output held",
    "run": "runs",
    "rerun": "runs again",
}
"""What a cell can be, in words; what comes later is drawn over what comes before."""

_BAND = {"kept": "held", "passing": "held", "results": "held-result", "again": "held-again"}

_DEPTH = 8
"""Module paths are told apart by at most so many of their parts."""

Stroke = tuple[int, int, int]
"""A row, and the first and the last column of a stretch of cells in it."""

Section = tuple[str, int, int]
"""A module, its first operation, and the one after its last."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Operations and runs, and the rows and columns that they fall into."""

    operations: int
    runs: int

    @property
    def rows(self) -> int:
        return min(self.operations, MAX_ROWS)

    @property
    def columns(self) -> int:
        return min(self.runs, MAX_COLUMNS)

    def row(self, op: int) -> int:
        return op * self.rows // self.operations

    def column(self, run: int) -> int:
        return run * self.columns // self.runs


def strokes(plan: PlanData, grid: Grid) -> dict[str, list[Stroke]]:
    """The stretches of cells of each role that there is, in the order of drawing, row by row."""
    found: dict[str, dict[int, set[int]]] = {role: defaultdict(set) for role in ROLES}
    for run, (op, before) in enumerate(zip(plan.schedule.runs, reruns(plan.schedule), strict=True)):
        found["rerun" if before else "run"][grid.row(op)].add(grid.column(run))
    timeline = plan.timeline()
    for copy, kind in zip(timeline.copies, copy_kinds(plan, timeline), strict=True):
        # A copy is held from the run that makes it to the last one that reads it.
        last = min(copy.end, grid.runs - 1)
        if last > copy.start and plan.graph.values[copy.value].size_bytes:
            columns = range(grid.column(copy.start), grid.column(last) + 1)
            found[_BAND[kind]][grid.row(plan.graph.producer[copy.value])].update(columns)
    return {
        role: [(row, first, last) for row in sorted(rows) for first, last in _stretches(rows[row])]
        for role, rows in found.items()
        if rows
    }


def _stretches(cells: set[int]) -> Iterator[tuple[int, int]]:
    first, *others = sorted(cells)
    previous = first
    for cell in others:
        if cell != previous + 1:
            yield first, previous
            first = cell
        previous = cell
    yield first, previous


def sections(plan: PlanData, height: float, label: float) -> list[Section]:
    """Stretches of operations (module, first, after) of one module that get a label: at the depth
    at which most of the rows belong to a stretch high enough for one, or else at which as many
    labels as there is room for name some of many low ones. An operation is `height` high, a label
    `label`."""
    for low in (label, label / 4, label / 8):
        best: list[Section] = []
        covered = 0
        for depth in range(_DEPTH, 0, -1):
            found = [s for s in _stretches_at(plan, depth) if (s[2] - s[1]) * height >= low]
            share = sum(after - first for _, first, after in found)
            # A shorter path that tells as much apart is the better name.
            if share > 1.15 * covered or (share >= covered and len(found) >= len(best)):
                best, covered = found, share
        if len(best) >= 4:
            break
    shown: list[Section] = []
    for section in best:
        apart = sum(section[1:]) - sum(shown[-1][1:]) if shown else 0  # twice, between middles
        if not shown or apart / 2 * height >= label:
            shown.append(section)
    return shown


def _stretches_at(plan: PlanData, depth: int) -> list[Section]:
    """Stretches with a module path of at most `depth` parts, each within one pass. Operations of a
    module around it, or of none, belong to the stretch that they interrupt."""
    found: list[Section] = []
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
