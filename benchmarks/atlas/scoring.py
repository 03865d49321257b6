"""Scores of a program's schedules, and the leaderboard.

A solver is a command. It gets the path of a graph's file, the GPU and the budget in bytes, and
prints a JSON list of operations in the order in which they run; or it ends with another exit code
than 0. Its schedules are simulated here: no figure comes from the solver itself.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

import remat
from benchmarks.atlas.graph_file import AtlasGraph, path_of
from benchmarks.atlas.results import METHODS, Cell, ResultFolder, Row, SolverResult, joined_machines
from benchmarks.harness import machine
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.schedule import Schedule
from remat.simulate import peak_and_time

_NAME = re.compile("[a-z0-9][a-z0-9-]{0,60}")


def solver_path(results: Path, name: str) -> Path:
    """Return the path of a solver's result."""
    return results / "solvers" / f"{name}.json.gz"


def score(
    name: str,
    command: Sequence[str],
    cells: Sequence[Cell],
    results: ResultFolder,
    *,
    limit_s: float,
    processes: int,
) -> SolverResult:
    """Run a solver on cells, write its rows, and return them. Stored rows of the same graphs, the
    same command and the same files that it names are used as they are.

    Ends the program for a solver that does not run, and for one that has changed if rows of other
    cells are stored.
    """
    if not _NAME.fullmatch(name) or name in METHODS:
        raise SystemExit(
            f"{name!r} cannot name a solver: use small letters, digits and hyphens, and no name of "
            "another row"
        )
    if shutil.which(command[0]) is None:
        raise SystemExit(f"there is no program {command[0]!r}")
    path = solver_path(results.folder, name)
    facts = machine.describe(torch.device("cpu"))
    result = SolverResult(
        solver=name,
        command=" ".join(command),
        files=_digest_of_files(command),
        date=_today(),
        machine=facts,
    )
    if path.exists():
        stored = SolverResult.load(path)
        if (stored.command, stored.files) == (result.command, result.files):
            result = stored
        else:
            _check_replaced(stored, cells, path)
    digests = {model: AtlasGraph.load(path_of(model)).digest for model in {c.model for c in cells}}
    rows = {
        model: {row.key: row for row in stored_rows}
        for model, stored_rows in result.rows.items()
        if result.graphs[model] == digests.get(model, result.graphs[model])
    }
    missing = [c for c in cells if (c.gpu, c.budget, name) not in rows.get(c.model, {})]
    if missing:
        smallest = min(missing, key=lambda c: path_of(c.model).stat().st_size)
        _check_runs(smallest, command, limit_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(processes) as pool:
        for cell, row in pool.map(lambda c: (c, _row(c, name, command, limit_s)), missing):
            rows.setdefault(cell.model, {})[row.key] = row
            print(f"{cell}: {row.note or f'{100 * (row.overhead or 0):+.1f}%'}", flush=True)
            result = result.model_copy(
                update={
                    "date": _today(),
                    "machine": joined_machines(result.machine, facts),
                    "graphs": result.graphs | digests,
                    "rows": {model: tuple(by_key.values()) for model, by_key in rows.items()},
                }
            )
            result.save(path)
    return result


def _check_replaced(stored: SolverResult, cells: Sequence[Cell], path: Path) -> None:
    """End the program if rows of an earlier version of a solver would be lost: those of cells that
    are not among `cells`."""
    rows = {Cell(model, r.gpu, r.budget): r for model, rs in stored.rows.items() for r in rs}
    if lost := rows.keys() - set(cells):
        raise SystemExit(
            f"{path} has rows of another version of {stored.solver} (its command: "
            f"{stored.command!r}), and these rows would be lost, as their cells are not selected: "
            f"{min(map(str, lost))} ({len(lost)} in all). Select them too (--models, --gpus, "
            "--budgets), use another name, or delete the file"
        )


def _check_runs(cell: Cell, command: Sequence[str], limit_s: float) -> None:
    """End the program if a solver does not start, or fails where keeping all values fits. A timeout
    is not an error here."""
    _, baseline_bytes = _graph(cell.model, cell.gpu)
    try:
        ran = _run(cell, command, baseline_bytes, limit_s)
    except subprocess.TimeoutExpired:
        return
    except OSError as error:
        raise SystemExit(f"the program {command[0]!r} does not start: {error}") from None
    if ran.returncode:
        raise SystemExit(
            f"the solver fails for {cell.model} with a budget of {baseline_bytes} bytes, where no "
            f"recomputation is needed: {_failure(ran)}; fix it; no row is stored"
        )


def _run(
    cell: Cell, command: Sequence[str], budget_bytes: int | None, limit_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, str(path_of(cell.model)), cell.gpu, str(budget_bytes)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
    )


def _failure(ran: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed program wrote to its error output, or its exit code."""
    lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
    return lines[-1][:300]


def _digest_of_files(command: Sequence[str]) -> str:
    """Return the digest of the files among a program and its arguments. Files that these import are
    not part of it."""
    digest = hashlib.sha256()
    for path in map(Path, command):
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _row(cell: Cell, name: str, command: Sequence[str], limit_s: float) -> Row:
    graph, baseline_bytes = _graph(cell.model, cell.gpu)
    budget = Budget.parse(cell.budget)
    budget_bytes = budget.in_bytes(baseline_bytes, graph.library_bytes)
    row = Row(gpu=cell.gpu, budget=cell.budget, method=name)
    began_s = time.perf_counter()
    try:
        ran = _run(cell, command, budget_bytes, limit_s)
    except subprocess.TimeoutExpired:
        return row.model_copy(update={"wall_s": limit_s, "note": f"no schedule in {limit_s:.0f} s"})
    wall_s = round(time.perf_counter() - began_s, 2)
    if ran.returncode:
        return row.model_copy(update={"wall_s": wall_s, "note": _failure(ran)})
    try:
        runs = json.loads(ran.stdout)
        if not isinstance(runs, list) or any(type(op) is not int for op in runs):
            raise ValueError("the output is no JSON list of integers")
        schedule = Schedule.of(runs)
        schedule.check(graph)
    except (ValueError, RecursionError, remat.RematError) as error:
        note = f"not a schedule: {error}"[:300]
        return row.model_copy(update={"wall_s": wall_s, "note": note})
    peak_bytes, time_s = peak_and_time(graph, schedule)
    if budget_bytes is not None and peak_bytes > budget_bytes:
        note = f"the peak is {peak_bytes} bytes, the budget {budget_bytes}"
        return row.model_copy(update={"wall_s": wall_s, "note": note})
    overhead = round(time_s / graph.total_cost_s - 1, 5)
    return row.model_copy(update={"wall_s": wall_s, "peak_bytes": peak_bytes, "overhead": overhead})


@lru_cache(maxsize=4)
def _graph(model: str, gpu: str) -> tuple[Graph, int]:
    graph = AtlasGraph.load(path_of(model)).on(gpu)
    return graph, peak_and_time(graph, Schedule.keep_all(graph))[0]


def _today() -> str:
    return datetime.date.today().isoformat()
