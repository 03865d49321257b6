"""Programs of this package run in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Row

_ROOT = Path(__file__).parents[2]


def published_graph_job(folder: Path, name: str) -> Row:
    """The job's graph: a published one."""
    return {"instances": str(folder.resolve()), "name": name}


def traced_graph_job(path: Path) -> Row:
    """The job's graph: a traced one."""
    return {"trace": str(path.resolve())}


def solve(source: Row, budget: str | int, **options: Any) -> Row:
    """`remat.solve` of a job's graph with `remat.Auto(**options)`; see `worker`."""
    job = source | {"budget": budget, "options": options}
    # For "min" the search for the peak has a time limit of its own.
    limit_s = options["time_limit"] * (2 if budget == "min" else 1)
    return run_worker("worker", job, limit_s)


def run_worker(program: str, job: Row, limit_s: float, slack_s: float = 120.0) -> Row:
    """The row that a program of this package prints for a job, or how it failed: it is ended when
    it is far over its time limit."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.solver.{program}"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd=_ROOT,
            timeout=1.5 * limit_s + slack_s,
        )
    except subprocess.TimeoutExpired as error:
        return _failed(job, f"ended after {error.timeout:.0f} s, far over its time limit")
    if done.returncode < 0:
        return _failed(job, f"killed by signal {-done.returncode}")
    if done.returncode:
        return _failed(job, (done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _failed(job: Row, failure: str) -> Row:
    facts = {"budget": job.get("budget"), "options": job.get("options")}
    return facts | {"status": "FAILED", "failure": failure[:500]}
