"""Section `kill`: after SIGKILL at random times, each accepted job finishes once and correctly."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.helpers.service import server as servers
from tests.helpers.service.server import Server

from benchmarks.service import jobs

_LEASE_S = "2"
_KILL_DELAY_S = (0.2, 6.0)
_TIMEOUT_S = 600.0


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Kill the server `options.kills` times, and its worker as many times."""
    plan = jobs.expected_plan()
    rng = random.Random(options.seed)
    settings = {**settings, "REMAT_LEASE_S": _LEASE_S}
    server = servers.start(folder, "--workers", "2", port=None, **settings)
    job_ids: list[str] = []
    began = time.monotonic()
    try:
        for turn in range(2 * options.kills):
            with server.http() as http:
                for _ in range(options.in_flight):
                    answer = http.post("/solve", json=jobs.request_body(len(job_ids)))
                    assert answer.status_code == 202, answer.text
                    job_ids.append(answer.json()["id"])
            time.sleep(rng.uniform(*_KILL_DELAY_S))
            if turn % 2:
                os.kill(worker_pid(server), signal.SIGKILL)
            else:
                server.stop(signal.SIGKILL)
                port = int(server.url.rpartition(":")[2])
                server = servers.start(folder, "--workers", "2", port=port, **settings)
            with server.http() as http:
                for id in job_ids[-options.in_flight :]:
                    servers.finished(http, id, _TIMEOUT_S)
        with server.http() as http:
            for id in job_ids:
                jobs.assert_succeeded_once(http, id, plan)
        restarts = server.log.read_text().count("the worker exited and is restarted")
    finally:
        server.process.kill()
        server.process.wait()
    return {
        "kills_of_the_server": options.kills,
        "kills_of_the_worker": options.kills,
        "worker_restarts_seen": restarts,
        "in_flight": options.in_flight,
        "accepted": len(job_ids),
        "finished_once_and_right": len(job_ids),
        "seconds": round(time.monotonic() - began, 1),
    }


def worker_pid(server: Server) -> int:
    """Return the process id of the server's worker, once it runs."""
    return servers.wait_for(lambda: _worker_child(server.process.pid))


def _worker_child(parent: int) -> int:
    """Return the process id of a worker among the children of a process; 0 if there is none."""
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
