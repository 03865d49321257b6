"""SIGKILL at random moments: every job that was accepted finishes, once and right."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.helpers import server as servers
from tests.helpers.server import Server

from benchmarks.service import jobs

_LEASE_S = "2"
_MOMENTS_S = (0.2, 6.0)
_PATIENCE_S = 600.0


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Kill the server `options.kills` times, and as often its worker."""
    plan = jobs.expected_plan()
    chance = random.Random(options.seed)
    settings = {**settings, "REMAT_LEASE_S": _LEASE_S}
    server = servers.start(folder, "--workers", "2", port=None, **settings)
    job_ids: list[str] = []
    began = time.monotonic()
    try:
        for turn in range(2 * options.kills):
            with server.http() as http:
                for _ in range(options.in_flight):
                    answer = http.post("/solve", json=jobs.body(len(job_ids)))
                    assert answer.status_code == 202, answer.text
                    job_ids.append(answer.json()["id"])
            time.sleep(chance.uniform(*_MOMENTS_S))
            if turn % 2:
                os.kill(worker_of(server), signal.SIGKILL)
            else:
                server.stop(signal.SIGKILL)
                port = int(server.url.rpartition(":")[2])
                server = servers.start(folder, "--workers", "2", port=port, **settings)
            with server.http() as http:
                for id in job_ids[-options.in_flight :]:
                    servers.finished(http, id, _PATIENCE_S)
        with server.http() as http:
            for id in job_ids:
                jobs.check(http, id, plan)
        lost = server.log.read_text().count("the worker exited and is restarted")
    finally:
        server.process.kill()
        server.process.wait()
    return {
        "kills_of_the_server": options.kills,
        "kills_of_the_worker": options.kills,
        "worker_restarts_seen": lost,
        "in_flight": options.in_flight,
        "accepted": len(job_ids),
        "finished_once_and_right": len(job_ids),
        "seconds": round(time.monotonic() - began, 1),
    }


def worker_of(server: Server) -> int:
    """The process id of the server's worker."""
    return servers.wait_for(lambda: _worker(server.process.pid))


def _worker(parent: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        is_worker = b"remat_server.work.processes" in command
        if is_worker and int(fields[1]) == parent and fields[0] != "Z":
            return int(stat.parent.name)
    return 0
