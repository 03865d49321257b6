"""Many clients at once: nothing lost, nothing done twice, nothing wrong, and quick looks."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers import server as servers
from tests.helpers.server import Server

from benchmarks.service import jobs

_LOOK_EVERY_S = 0.02
_PATIENCE_S = 1800.0


def run(folder: Path, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Submit `options.jobs` jobs by `options.clients` clients, and look at them all the while."""
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
        solving = threading.Event()
        looks = _StatusPoller(server, job_ids, solving)
        looks.start()
        with server.http() as http:
            for id in job_ids:
                servers.finished(http, id, _PATIENCE_S)
            done_s = time.monotonic() - began
            solving.set()
            looks.join()
            for id in job_ids:
                jobs.check(http, id, plan)
            listed = [id for id in _all_jobs(http) if id not in before]
        assert sorted(listed) == sorted(job_ids), "a job is lost, or there is one too many"
    percentiles = statistics.quantiles(looks.seconds, n=100)
    return {
        "jobs": options.jobs,
        "clients": options.clients,
        "submitted_in_s": round(submitted_s, 2),
        "done_in_s": round(done_s, 2),
        "looks": len(looks.seconds),
        "look_p50_s": round(percentiles[49], 4),
        "look_p99_s": round(percentiles[98], 4),
        "look_max_s": round(max(looks.seconds), 4),
    }


def _submit(server: Server, numbers: range) -> list[str]:
    with server.http() as http:
        answers = []
        for number in numbers:
            answer = http.post("/solve", json=jobs.body(number))
            assert answer.status_code == 202, answer.text
            answers.append(answer.json()["id"])
        return answers


class _StatusPoller(threading.Thread):
    """`GET /jobs/{id}`, one after the other, for as long as two solves run."""

    def __init__(self, server: Server, ids: list[str], over: threading.Event) -> None:
        super().__init__()
        self._server, self._ids, self._over = server, ids, over
        self.seconds: list[float] = []

    def run(self) -> None:
        with self._server.http() as http:
            number = 0
            while not self._over.is_set():
                id = self._ids[number % len(self._ids)]
                began = time.perf_counter()
                answer = http.get(f"/jobs/{id}")
                self.seconds.append(time.perf_counter() - began)
                assert answer.status_code == 200
                number += 7
                time.sleep(_LOOK_EVERY_S)


def _all_jobs(http: Any) -> list[str]:
    answers, cursor = [], None
    while True:
        query = {"limit": 100} | ({"cursor": cursor} if cursor else {})
        page = http.get("/jobs", params=query).json()
        answers += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            return answers
