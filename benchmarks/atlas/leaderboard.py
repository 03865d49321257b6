"""The leaderboard: how often each method fits a budget, and how much more time it takes than the
best plan by recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from statistics import median

from benchmarks.atlas.results import (
    METHODS,
    OFFLOAD,
    RECOMPUTE,
    SPLIT,
    ModelResult,
    Row,
    SolverResult,
)
from remat.report.report import Table


@dataclass(frozen=True)
class Standing:
    """A method's line of the leaderboard.

    `feasible` of `cells` budgets were met; a cell counts if any schedule of recomputation meets it.
    `ratio` is the geometric mean of its time over the lower bound of all schedules, over the cells
    that it meets.
    """

    method: str
    cells: int
    feasible: int
    ratio: float | None
    worst: float | None
    median_s: float


def standings(results: Sequence[ModelResult], solvers: Sequence[SolverResult]) -> list[Standing]:
    """Return the lines of all methods that only recompute, best first."""
    rows = [(r.model, row) for r in results for row in r.rows if row.budget.endswith("%")]
    by_cell = {(model, row.key): row for model, row in rows}
    cells = {
        (model, row.gpu, row.budget): row
        for model, row in rows
        if row.method == RECOMPUTE and row.overhead is not None
    }
    graphs = {result.model: result.graph for result in results}
    for solver in solvers:
        for model, solver_rows in solver.rows.items():
            if solver.graphs.get(model) != graphs.get(model):
                continue  # rows of another graph
            by_cell |= {(model, row.key): row for row in solver_rows}
    names = [m for m in METHODS if m not in (SPLIT, OFFLOAD)]
    names += [solver.solver for solver in solvers]
    lines = [_standing(name, cells, by_cell) for name in names]
    return sorted(lines, key=lambda line: (-line.feasible, line.ratio or 0.0))


def _standing(
    name: str,
    cells: dict[tuple[str, str, str], Row],
    by_cell: dict[tuple[str, tuple[str, str, str]], Row],
) -> Standing:
    ratios: list[float] = []
    times_s: list[float] = []
    tried = 0
    for (model, gpu, budget), best in cells.items():
        row = by_cell.get((model, (gpu, budget, name)))
        if row is None:
            continue
        tried += 1
        times_s.append(row.wall_s)
        if row.overhead is not None:
            ratios.append((1 + row.overhead) / (1 + (best.bound or 0.0)))
    mean = exp(fsum(map(log, ratios)) / len(ratios)) if ratios else None
    seconds = median(times_s) if times_s else 0.0
    return Standing(name, tried, len(ratios), mean, max(ratios, default=None), seconds)


HEADER = ("method", "budgets met", "time / bound", "worst", "median seconds")


def cells_of(line: Standing) -> tuple[str, ...]:
    """Return the cells of a line, under `HEADER`."""
    return (
        line.method,
        f"{line.feasible} of {line.cells}",
        "" if line.ratio is None else f"{line.ratio:.3f}",
        "" if line.worst is None else f"{line.worst:.2f}",
        f"{line.median_s:.2f}",
    )


def table(lines: Iterable[Standing]) -> str:
    """Return the leaderboard as text."""
    return "\n".join(Table([HEADER, *map(cells_of, lines)]).lines())


def load_all(folder: Path) -> tuple[list[ModelResult], list[SolverResult]]:
    """Return the results of all models and solvers in a folder."""
    results = [ModelResult.load(path) for path in sorted(folder.glob("*.json.gz"))]
    solvers = [SolverResult.load(path) for path in sorted(folder.glob("solvers/*.json.gz"))]
    return results, solvers
