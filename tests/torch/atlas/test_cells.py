"""The cells of the atlas: a real model's rows, and the validator that checks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.atlas.cells import solve_cells
from benchmarks.atlas.checking import problems_of
from benchmarks.atlas.graph_file import AtlasGraph, path_of
from benchmarks.atlas.results import (
    AT_BLOCKS,
    METHODS,
    OFFLOAD,
    RECOMPUTE,
    RESULTS,
    ResultFolder,
    Row,
)
from benchmarks.atlas.running import missing_cells
from tests.helpers.paths import ROOT

SMALLEST = "unet-segmentation"
"""A published graph of 247 operations."""

STORED = sorted(path.name.removesuffix(".json.gz") for path in RESULTS.glob("*.json.gz"))


def stored(folder: ResultFolder, rows: list[Row]) -> None:
    """Write rows to the results of `SMALLEST`."""
    result = folder.load(AtlasGraph.load(path_of(SMALLEST)), {})
    folder.save(result.with_rows(rows, result.machine))


@pytest.mark.slow
def test_rows_of_a_model_are_valid(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    rows = [row for budget in ("60%", AT_BLOCKS) for row in solve_cells(SMALLEST, "h100", budget)]
    stored(folder, rows)
    assert problems_of(SMALLEST, tmp_path) == []
    by_key = {row.key: row for row in rows}
    recompute = by_key["h100", "60%", RECOMPUTE]
    offload = by_key["h100", "60%", OFFLOAD]
    assert recompute.overhead is not None
    assert offload.overhead is not None
    assert 0 < offload.overhead <= recompute.overhead
    result = folder.load(AtlasGraph.load(path_of(SMALLEST)), {})
    missing = missing_cells({SMALLEST: result}, ("h100", "a100"), ("60%", "50%"))
    assert [(cell.gpu, cell.budget) for cell in missing] == [
        ("h100", "50%"),
        ("a100", "60%"),
        ("a100", "50%"),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peak_bytes": 10**12}, "exceeds the budget"),
        ({"bound": 0.5}, "below the bound"),
        ({"peak_bytes": None, "overhead": None}, "needs a reason"),
    ],
)
def test_the_validator_finds_wrong_rows(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    row = Row(
        gpu="h100", budget="60%", method=RECOMPUTE, peak_bytes=10**9, overhead=0.1, bound=0.05
    )
    stored(ResultFolder(tmp_path), [row])
    assert problems_of(SMALLEST, tmp_path) == []
    stored(ResultFolder(tmp_path), [row.model_copy(update=change)])
    (only,) = problems_of(SMALLEST, tmp_path)
    assert problem in only


@pytest.mark.parametrize(
    "model",
    [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in STORED],
)
def test_published_results_are_complete_rows_of_their_graphs(model: str) -> None:
    folder = ResultFolder()
    result = folder.load(AtlasGraph.load(path_of(model)), {})
    cells = {row.key[:2] for row in result.rows}
    assert cells
    assert {row.key for row in result.rows} == {(*cell, m) for cell in cells for m in METHODS}
    assert problems_of(model, folder.folder) == []


@pytest.mark.slow
def test_selective_ends_where_the_presolve_of_highs_loops() -> None:
    program = (
        "from benchmarks.atlas.graph_file import AtlasGraph, path_of\n"
        "import remat\n"
        "graph = AtlasGraph.load(path_of('gpt2')).on('h100')\n"
        "selective = remat.strategies.Selective(choices=6, time_limit=9.0)\n"
        "print(remat.solve(graph, '80%', selective).overhead)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "solver")))}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert 0 < float(ran.stdout) < 0.05
