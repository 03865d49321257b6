"""Running the atlas: cells that are missing, in processes of this machine or on a Ray cluster.

Rows are written as soon as a cell is done, so that an interrupted run goes on where it ended.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.atlas.cells import solve_cells
from benchmarks.atlas.graph_file import AtlasGraph, path_of
from benchmarks.atlas.results import METHODS, Cell, ModelResult, ResultFolder, Row
from benchmarks.harness import machine

Outcome = tuple[Cell, list[Row] | str]
"""A cell with its rows, or with what failed."""


def missing_cells(
    results: dict[str, ModelResult], gpus: Sequence[str], budgets: Sequence[str]
) -> list[Cell]:
    """Return the cells without rows of all methods: all models on the first GPU come first."""
    stored = {(r.model, *row.key) for r in results.values() for row in r.rows}
    return [
        Cell(model, gpu, budget)
        for gpu in gpus
        for model in results
        for budget in budgets
        if any((model, gpu, budget, method) not in stored for method in METHODS)
    ]


def run(
    models: Sequence[str],
    gpus: Sequence[str],
    budgets: Sequence[str],
    folder: ResultFolder,
    *,
    processes: int,
    ray_address: str | None,
) -> int:
    """Solve the missing cells, and write each to the results. Return the number that failed."""
    facts = machine.describe(torch.device("cpu"))
    results = {m: folder.load(AtlasGraph.load(path_of(m)), facts) for m in models}
    cells = missing_cells(results, gpus, budgets)
    print(f"{len(cells)} cells to solve", flush=True)
    began_s, failures = time.monotonic(), 0
    outcomes = (
        _on_this_machine(cells, processes) if ray_address is None else _on_ray(cells, ray_address)
    )
    for number, (cell, outcome) in enumerate(outcomes, 1):
        if isinstance(outcome, str):
            failures += 1
            print(f"{cell}: FAILED: {outcome}", file=sys.stderr, flush=True)
            continue
        results[cell.model] = results[cell.model].with_rows(outcome, facts)
        folder.save(results[cell.model])
        minutes = (time.monotonic() - began_s) / 60
        print(f"[{number}/{len(cells)}, {minutes:.0f} min] {cell}: {_summary(outcome)}", flush=True)
    return failures


def _summary(rows: list[Row]) -> str:
    """Return a line with the extra time of the methods that have a plan."""
    figures = [
        f"{row.method} {100 * row.overhead:+.1f}%" for row in rows if row.overhead is not None
    ]
    return ", ".join(figures) or "no plan"


def _on_this_machine(cells: Sequence[Cell], processes: int) -> Iterator[Outcome]:
    # A new process for each: torch and HiGHS have threads, which a fork would not copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures: dict[Future[list[Row]], Cell] = {pool.submit(_solve, cell): cell for cell in cells}
        try:
            for future in as_completed(futures):
                error = future.exception()
                yield futures[future], repr(error) if error else future.result()
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _on_ray(cells: Sequence[Cell], address: str) -> Iterator[Outcome]:
    """Yield the outcomes of cells on a Ray cluster, "local" for one on this machine.

    Each worker needs this repository and its packages, as `python -m benchmarks.atlas` does.
    """
    import ray
    from ray.exceptions import RayError

    ray.init(address=None if address == "local" else address, include_dashboard=False)
    remote: Any = ray.remote(num_cpus=1)(_solve)
    waiting = {remote.remote(cell): cell for cell in cells}
    try:
        while waiting:
            (reference,), _ = ray.wait([*waiting], num_returns=1)
            cell = waiting.pop(reference)
            try:
                yield cell, ray.get(reference)
            except RayError as error:
                yield cell, repr(error)
    finally:
        ray.shutdown()


def _solve(cell: Cell) -> list[Row]:
    torch.set_num_threads(1)
    return solve_cells(cell.model, cell.gpu, cell.budget)
