"""Section `load`: many clients at once; no job is lost, repeated or wrong, and polls are fast."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers.service import server as servers
from tests.helpers.service.server import Server

from benchmarks.service import jobs

_POLL_INTERVAL_S = 0.02
_TIMEOUT_S = 1800.0


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Submit `options.jobs` jobs by `options.clients` clients, and poll them until all are done."""
    plan = jobs.expected_plan()
    settings = {**settings, "REMAT_REQUESTS_PER_MINUTE": "1000000"}
    with servers.running(folder, "--workers", "2", **settings) as server:
        with server.http() as http:
            before = set(_all_jobs(http))
        began = time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            share = [range(c, options.jobs, options.clients) for c in range(options.clients)]
            job_ids = [
                id for ids in pool.map(lambda part: _submit(server, part), share) for id in ids
            ]
        submitted_s = time.monotonic() - began
        assert len(set(job_ids)) == options.jobs
        all_done = threading.Event()
        poller = _StatusPoller(server, job_ids, all_done)
        poller.start()
        with server.http() as http:
            for id in job_ids:
                servers.finished(http, id, _TIMEOUT_S)
            done_s = time.monotonic() - began
            all_done.set()
            poller.join()
            for id in job_ids:
                jobs.assert_succeeded_once(http, id, plan)
            listed = [id for id in _all_jobs(http) if id not in before]
        assert sorted(listed) == sorted(job_ids), "a job is missing, or listed twice"
    percentiles = statistics.quantiles(poller.seconds, n=100)
    return {
        "jobs": options.jobs,
        "clients": options.clients,
        "submitted_in_s": round(submitted_s, 2),
        "done_in_s": round(done_s, 2),
        "looks": len(poller.seconds),
        "look_p50_s": round(percentiles[49], 4),
        "look_p99_s": round(percentiles[98], 4),
        "look_max_s": round(max(poller.seconds), 4),
    }


def _submit(server: Server, numbers: range) -> list[str]:
    """Submit the jobs with these numbers, and return their ids."""
    with server.http() as http:
        job_ids = []
        for number in numbers:
            answer = http.post("/solve", json=jobs.request_body(number))
            assert answer.status_code == 202, answer.text
            job_ids.append(answer.json()["id"])
        return job_ids


class _StatusPoller(threading.Thread):
    """Polls `GET /jobs/{id}` of one job after the other until an event is set."""

    def __init__(self, server: Server, ids: list[str], all_done: threading.Event) -> None:
        super().__init__()
        self._server, self._ids, self._all_done = server, ids, all_done
        self.seconds: list[float] = []

    def run(self) -> None:
        with self._server.http() as http:
            number = 0
            while not self._all_done.is_set():
                id = self._ids[number % len(self._ids)]
                began = time.perf_counter()
                answer = http.get(f"/jobs/{id}")
                self.seconds.append(time.perf_counter() - began)
                assert answer.status_code == 200
                number += 7
                time.sleep(_POLL_INTERVAL_S)


def _all_jobs(http: Any) -> list[str]:
    """Return the ids of all jobs, from all pages of the list."""
    job_ids, cursor = [], None
    while True:
        query = {"limit": 100} | ({"cursor": cursor} if cursor else {})
        page = http.get("/jobs", params=query).json()
        job_ids += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            return job_ids
