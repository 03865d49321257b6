"""Jobs of the solver benchmark: each runs a worker module of this package in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Row

_ROOT = Path(__file__).parents[2]


def published_graph_job(folder: Path, name: str) -> Row:
    """Return the part of a job that names a published graph."""
    return {"instances": str(folder.resolve()), "name": name}


def traced_graph_job(path: Path) -> Row:
    """Return the part of a job that names a traced graph."""
    return {"trace": str(path.resolve())}


def solve(source: Row, budget: str | int, **options: Any) -> Row:
    """Solve a job's graph with `remat.Auto(**options)` in a worker process; return its row."""
    job = source | {"budget": budget, "options": options}
    # For "min", the search for the smallest peak has a separate time limit.
    limit_s = options["time_limit"] * (2 if budget == "min" else 1)
    return run_worker("worker", job, limit_s)


def run_worker(module: str, job: Row, limit_s: float, slack_s: float = 120.0) -> Row:
    """Run a worker module on a job, and return the row that it prints, or a row with its failure.

    The process is killed when it far exceeds its time limit.
    """
    try:
        completed = subprocess.run(
            [sys.executable, "-m", f"benchmarks.solver.{module}"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd=_ROOT,
            timeout=1.5 * limit_s + slack_s,
        )
    except subprocess.TimeoutExpired as error:
        return _failed(job, f"killed after {error.timeout:.0f} s, far over its time limit")
    if completed.returncode < 0:
        return _failed(job, f"killed by signal {-completed.returncode}")
    if completed.returncode:
        return _failed(job, (completed.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(completed.stdout.strip().splitlines()[-1])


def _failed(job: Row, failure: str) -> Row:
    """Return the row of a job whose process failed."""
    facts = {"budget": job.get("budget"), "options": job.get("options")}
    return facts | {"status": "FAILED", "failure": failure[:500]}
