"""Worker process that solves one job: a job on stdin, a row on stdout, as JSON.

Each solve has its own process, so that the process's memory is the solve's and a crash loses one
row only. It imports no torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import remat
from benchmarks.models.published_graphs import load_published_graph
from remat.limits.budget import Budget
from remat.progress import Progress


def main() -> int:
    """Read the job, solve it, and print the row."""
    job = json.load(sys.stdin)
    row = solve_row(job_graph(job), job["budget"], job["options"])
    print(json.dumps(row))
    return 0


def job_graph(job: dict[str, Any]) -> remat.Graph:
    """Return the graph of a job: a traced one or a published one."""
    if "trace" in job:
        return remat.Trace.load(job["trace"]).graph()
    return load_published_graph(Path(job["instances"]), job["name"])


def solve_row(graph: remat.Graph, budget: str | int, options: dict[str, Any]) -> dict[str, Any]:
    """Solve a graph, and return a row with the plan's figures or the error, times and memory."""
    baseline_bytes = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    row: dict[str, Any] = {
        "budget": budget,
        "budget_bytes": Budget.parse(budget).in_bytes(baseline_bytes, graph.library_bytes),
        "baseline_peak_bytes": baseline_bytes,
        "constant_bytes": graph.constant_bytes,
        "operations": len(graph),
        "options": options,
    }
    strategy = remat.Auto(**options)
    before_bytes = peak_rss_bytes()
    began = time.perf_counter()
    times_s: dict[str, float] = {}

    def record_time(event: Progress) -> None:
        if event.phase == "cost" and event.incumbent is not None:
            times_s.setdefault("first_schedule_s", time.perf_counter() - began)
            if event.gap is not None and event.gap <= strategy.gap:
                times_s.setdefault("gap_s", time.perf_counter() - began)

    try:
        outcome = _plan_facts(remat.solve(graph, budget, strategy, progress=record_time))
    except remat.InfeasibleBudget as error:
        outcome = {
            "status": "INFEASIBLE",
            "smallest_peak_bytes": error.min_feasible_bytes,
            "proved": error.is_proved,
            "message": str(error),
        }
    except remat.SolverTimeout as error:
        outcome = {"status": "TIMEOUT", "message": str(error)}
    seconds = time.perf_counter() - began
    if "overhead" in outcome:
        times_s = {"first_schedule_s": seconds, "gap_s": seconds} | times_s
    memory = {"peak_rss_bytes": peak_rss_bytes(), "loaded_rss_bytes": before_bytes}
    return row | outcome | times_s | {"seconds": seconds} | memory


def _plan_facts(plan: remat.Plan) -> dict[str, Any]:
    """Return the figures of a plan."""
    return {
        "status": plan.status.name,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "bound_scope": plan.bound_scope,
        "recomputations": len(plan.schedule) - len(plan.graph),
        "slots": plan.stats.get("slots", 0),
        "rows": plan.stats.get("rows", 0),
        "stats": dict(plan.stats),
    }


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process.

    On Linux this is VmHWM, because `ru_maxrss` includes the parent's memory at the fork.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


if __name__ == "__main__":
    raise SystemExit(main())
