"""Runner of the tables: each case in a process of its own, whose crash or timeout is a result.

The rows of a case are stored as soon as it ends, so that an interrupted run resumes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.software_gpu.environment import ROOT, gpu_environment

from benchmarks.software_gpu.tables import Row, Table


@dataclass(frozen=True)
class CaseResult:
    """The rows of one case. `failure` says how its process ended if it did not finish."""

    table: str
    case: str
    rows: tuple[Row, ...]
    seconds: float
    failure: str = ""

    @property
    def is_met(self) -> bool:
        """True if the process finished, and each row meets its requirement."""
        return not self.failure and all(row["is_met"] for row in self.rows)


def run_cases(
    cases: Iterable[tuple[Table, str]],
    folder: Path,
    library: Path,
    *,
    device: str = "h100",
    jobs: int = 2,
    repeat: bool = False,
    only_finished: bool = False,
    on_result: Callable[[CaseResult], None] = lambda result: None,
) -> list[CaseResult]:
    """Run cases, `jobs` at a time, and return their results in order.

    A case that finished in an earlier run is read from `folder`, unless `repeat` is set; with
    `only_finished` no other is run, and its result says so. `library` is the folder of the software
    GPU's library, `device` the GPU whose properties it has.
    """

    def run(table_and_case: tuple[Table, str]) -> CaseResult:
        table, case = table_and_case
        path = folder / device / table.name / f"{case.replace('/', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if only_finished and not path.exists():
            result = CaseResult(table.name, case, (), 0.0, "not run")
        elif repeat or not path.exists():
            result = _run(table, case, path, library, device)
        else:
            stored = json.loads(path.read_text())
            result = CaseResult(table.name, case, tuple(stored["rows"]), stored["seconds"])
        on_result(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, cases))


def _run(table: Table, case: str, path: Path, library: Path, device: str) -> CaseResult:
    environment = dict(os.environ)
    if table.has_gpu:
        environment = gpu_environment(
            library, device, is_expandable=True, has_numbers=table.has_numbers
        )
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'solver'}:{environment.get('PYTHONPATH', '')}"}
    output, log = path.with_suffix(".rows"), path.with_suffix(".log")
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.software_gpu.child", table.name, case, str(output)]
    started_s = time.monotonic()
    # Plans in Inductor's cache are found by remat's version, not by its code. Costs that are
    # measured here are not those of the GPU whose name they have.
    with log.open("wb") as stream, tempfile.TemporaryDirectory() as cache:
        environment |= table.environment()
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "REMAT_CACHE_DIR": cache}
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                env=environment, timeout=table.limit_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.monotonic() - started_s
    if not output.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = f"not finished in {table.limit_s:.0f} s" if code is None else f"exit code {code}"
        return CaseResult(
            table.name, case, (), seconds, f"{reason}: {lines[-1][:300] if lines else 'no output'}"
        )
    rows = json.loads(output.read_text())
    path.write_text(json.dumps({"rows": rows, "seconds": round(seconds, 1)}, indent=1))
    return CaseResult(table.name, case, tuple(rows), seconds)
