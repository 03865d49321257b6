"""Loss: killed servers and workers, stopped servers, solves that take too much."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.service import jobs
from benchmarks.service.kill import worker_of
from tests import server as servers
from tests.killing import at_once, killing
from tests.server import HARD, chain, finished, post, solving_processes, wait_for
from tests.solvers import needs_cbc
from tests.test_baselines import uneven_stages

import remat


@pytest.fixture(scope="module")
def plan() -> remat.Plan:
    return jobs.expected()


def test_kill_of_server_and_worker_loses_nothing(tmp_path: Path, plan: remat.Plan) -> None:
    settings = {"REMAT_LEASE_S": "1", "REMAT_CONCURRENT_SOLVES": "2"}
    server = servers.start(tmp_path, **settings)
    made: list[str] = []
    try:
        for kill_server in (True, False):
            with server.http() as http:
                for _ in range(4):
                    made.append(http.post("/solve", json=jobs.body(len(made))).json()["id"])
                wait_for(lambda: solving_processes(str(tmp_path)))
            if kill_server:
                server.stop(signal.SIGKILL)
                wait_for(lambda: not solving_processes(str(tmp_path)), 5)
                server = servers.start(tmp_path, **settings)
            else:
                os.kill(worker_of(server), signal.SIGKILL)
                wait_for(lambda: not solving_processes(str(tmp_path)), 5)
        with server.http() as http:
            for id in made:
                finished(http, id, 120)
                jobs.check(http, id, plan)
            assert {job["id"] for job in http.get("/jobs").json()["jobs"]} == set(made)
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow
def test_sigterm_drains_what_is_under_way(tmp_path: Path) -> None:
    server = servers.start(tmp_path, REMAT_DRAIN_S="60", REMAT_CONCURRENT_SOLVES="1")
    with server.http() as http:
        short = {"graph": chain(60), "budget": "22%"}
        options = {"strategy": {**HARD, "time_limit": 4.0}}
        running = post(http, **short, options=options).json()["id"]
        waiting = post(http, budget="66%").json()["id"]
        wait_for(lambda: http.get(f"/jobs/{running}").json()["status"] == "running")
    server.stop(signal.SIGTERM)
    assert not solving_processes(str(tmp_path))
    with servers.running(tmp_path, REMAT_CONCURRENT_SOLVES="1") as again, again.http() as http:
        first = http.get(f"/jobs/{running}").json()
        assert first["status"] == "succeeded"
        assert first["started_at"] < again_started(again.log)
        assert finished(http, waiting)["status"] == "succeeded"


@pytest.mark.slow
def test_sigterm_gives_back_what_takes_too_long(tmp_path: Path) -> None:
    server = servers.start(tmp_path, REMAT_DRAIN_S="0.5", REMAT_CONCURRENT_SOLVES="1")
    with server.http() as http:
        limited = {"strategy": {**HARD, "time_limit": 3.0}}
        id = post(http, graph=chain(60), budget="22%", options=limited).json()["id"]
        wait_for(lambda: solving_processes(str(tmp_path)))
    began = time.monotonic()
    server.stop(signal.SIGTERM)
    assert time.monotonic() - began < 10
    with servers.running(tmp_path) as again, again.http() as http:
        assert finished(http, id)["status"] == "succeeded"


def test_a_solve_over_its_memory_fails_alone(tmp_path: Path) -> None:
    settings = {"REMAT_SOLVE_MEMORY_BYTES": "250MiB", "REMAT_CONCURRENT_SOLVES": "2"}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        large = post(http, graph=chain(400), budget="20%", options={"strategy": HARD}).json()["id"]
        small = post(http, budget="70%").json()["id"]
        assert finished(http, small)["status"] == "succeeded"
        ended = finished(http, large, 120)
        assert ended["status"] == "failed"
        assert ended["problem"]["type"].endswith(":memory")
        assert "REMAT_SOLVE_MEMORY_BYTES" in ended["problem"]["detail"]
        assert finished(http, post(http, budget="71%").json()["id"])["status"] == "succeeded"


@pytest.mark.slow
def test_a_job_that_loses_every_worker_fails(tmp_path: Path) -> None:
    settings = {"REMAT_LEASE_S": "0.5", "REMAT_ATTEMPTS": "2", "REMAT_CONCURRENT_SOLVES": "1"}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        id = post(http, graph=chain(60), budget="22%", options={"strategy": HARD}).json()["id"]
        for _ in range(2):
            wait_for(lambda: solving_processes(str(tmp_path)))
            os.kill(worker_of(server), signal.SIGKILL)
            wait_for(lambda: not solving_processes(str(tmp_path)), 5)
        ended = finished(http, id, 60)
        assert ended["status"] == "failed"
        assert ended["problem"]["type"].endswith("worker-lost")


@pytest.mark.slow
def test_a_killed_solve_fails_with_a_reason_and_the_next_one_works(tmp_path: Path) -> None:
    with servers.running(tmp_path, REMAT_CONCURRENT_SOLVES="1") as server, server.http() as http:
        id = post(http, graph=chain(60), budget="22%", options={"strategy": HARD}).json()["id"]
        (solving,) = wait_for(lambda: solving_processes(str(tmp_path)))
        os.kill(solving, signal.SIGKILL)
        ended = finished(http, id)
        assert ended["status"] == "failed"
        assert ended["problem"]["type"].endswith("crashed")
        assert "SIGKILL" in ended["problem"]["detail"]
        assert finished(http, post(http, budget="72%").json()["id"])["status"] == "succeeded"


@pytest.mark.slow
def test_workers_elsewhere_share_a_postgresql_store(
    tmp_path: Path, postgres_url: str, plan: remat.Plan
) -> None:
    settings = {"REMAT_DATABASE_URL": postgres_url, "REMAT_LEASE_S": "1"}
    with servers.running(tmp_path, "--workers", "0", **settings) as server, server.http() as http:
        options = {"strategy": {**HARD, "time_limit": 5.0}}
        long = [
            post(http, graph=chain(60 + i), budget="22%", options=options).json()["id"]
            for i in range(2)
        ]
        made = [http.post("/solve", json=jobs.body(i)).json()["id"] for i in range(4)]
        assert {http.get(f"/jobs/{id}").json()["status"] for id in long + made} == {"queued"}
        command = [sys.executable, "-m", "remat.cli", "worker", "--database-url", postgres_url]
        command += ["--concurrent-solves", "1"]
        workers = [subprocess.Popen(command, env=server.environment) for _ in range(2)]
        try:
            wait_for(lambda: len(solving_processes(str(tmp_path))) == 2)
            workers[0].kill()
            assert all(finished(http, id, 120)["status"] == "succeeded" for id in long)
            for id in made:
                finished(http, id, 120)
                jobs.check(http, id, plan)
            workers[1].terminate()
            assert workers[1].wait(timeout=30) == 0
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def again_started(log: Path) -> float:
    """When the last server of a log said that it starts."""
    from datetime import datetime

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    started = [line["timestamp"] for line in lines if line["event"] == "service starts"]
    return datetime.fromisoformat(started[-1]).timestamp()


@needs_cbc
def test_a_solve_goes_on_where_its_solver_is_killed(tmp_path: Path) -> None:
    """The job has a plan, its stats say why it is no better, and so does the log."""
    graph = uneven_stages(2, 14)
    strategy = remat.Exact(solver="CBC", time_limit=200)
    # Its user has warnings as errors.
    with servers.running(tmp_path, REMAT_SOLVERS="HiGHS,CBC", PYTHONWARNINGS="error") as server:
        with (
            killing(at_once, server.process.pid) as kills,
            server.client() as client,
            pytest.warns(remat.SolverWarning, match="CBC .* failed or was killed"),
        ):
            found = client.solve(graph, "60%", strategy)
        said = [line for line in server.log.read_text().splitlines() if "SolverWarning" in line]
    assert len(kills.pids) == 1
    assert found.status is remat.Status.FEASIBLE
    assert found.peak_bytes <= found.budget_bytes
    assert "failed or was killed" in str(found.stats["solver_error"])
    (told,) = map(json.loads, said)
    assert told["reason"].startswith(str(found.stats["solver_error"]))
