"""Recovery: killed servers and workers, stopped servers, solves that exceed their limits."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.service import jobs
from benchmarks.service.kill import worker_pid
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from tests.helpers.graphs import random_stages
from tests.helpers.killed_solvers import at_once, killing_cbc
from tests.helpers.process_limit import PROCESS_LIMIT_S
from tests.helpers.service import postgres
from tests.helpers.service import server as servers
from tests.helpers.service.server import HARD, chain, finished, post, solving_processes, wait_for
from tests.helpers.solvers import needs_cbc

import remat
from remat.documents.plan import GraphRecord
from remat.plan import Status
from remat.service.wire import ProgressRecord
from remat_server.settings import Settings
from remat_server.store import leases
from remat_server.store.database import Database, now
from remat_server.store.tables import jobs as jobs_table
from remat_server.work import worker as workers
from remat_server.work.messages import AnswerMessage, ProgressMessage, SolveTask
from remat_server.work.placements.interface import SolveLost, SolveMessage


@pytest.fixture(scope="module")
def plan() -> remat.Plan:
    return jobs.expected_plan()


@pytest.mark.slow
def test_killing_server_and_worker_loses_no_job(tmp_path: Path, plan: remat.Plan) -> None:
    settings = {"REMAT_LEASE_S": "1", "REMAT_CONCURRENT_SOLVES": "2"}
    server = servers.start(tmp_path, **settings)
    job_ids: list[str] = []
    try:
        for kill_server in (True, False):
            with server.http() as http:
                for _ in range(4):
                    job_ids.append(
                        http.post("/solve", json=jobs.request_body(len(job_ids))).json()["id"]
                    )
                wait_for(lambda: solving_processes(str(tmp_path)))
            if kill_server:
                server.stop(signal.SIGKILL)
                wait_for(lambda: not solving_processes(str(tmp_path)))
                server = servers.start(tmp_path, **settings)
            else:
                os.kill(worker_pid(server), signal.SIGKILL)
                wait_for(lambda: not solving_processes(str(tmp_path)))
        with server.http() as http:
            for id in job_ids:
                finished(http, id, 120)
                jobs.assert_succeeded_once(http, id, plan)
            assert {job["id"] for job in http.get("/jobs").json()["jobs"]} == set(job_ids)
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow
def test_a_lease_is_renewed_while_the_solve_runs(tmp_path: Path) -> None:
    """Otherwise the worker's free slot would claim the job once more."""
    lease_s = 6.0  # renewed every 2 s: a busy machine may be late by 4 s
    settings = {"REMAT_LEASE_S": str(lease_s), "REMAT_CONCURRENT_SOLVES": "2"}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        id = post(http, graph=chain(40), budget="22%", options={"strategy": HARD}).json()["id"]
        database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
        job = jobs_table.c

        def lease_until(after: float = 0.0) -> float:
            holds = select(job.lease_until, job.attempts, now()).where(job.id == id)
            with database.read() as connection:
                until, attempts, clock = connection.execute(holds).one()
            assert attempts <= 1
            return until if until and after < clock < until else 0.0

        first = wait_for(lease_until)
        wait_for(lambda: lease_until(after=first))
        database.close()
        assert http.delete(f"/jobs/{id}").status_code == 202
        finished(http, id)
        with http.sse(f"/jobs/{id}/events") as source:
            statuses = [
                json.loads(event.data)["status"] for event in source if event.event == "status"
            ]
    assert statuses == ["queued", "running", "cancelled"]


@pytest.mark.slow
def test_a_lease_that_expires_during_its_solve_starts_no_second_solve_here(tmp_path: Path) -> None:
    """The store may not have answered in time, and no other worker claimed the job."""
    with servers.running(tmp_path, REMAT_CONCURRENT_SOLVES="2") as server, server.http() as http:
        id = post(http, graph=chain(41), budget="22%", options={"strategy": HARD}).json()["id"]
        solving = wait_for(lambda: solving_processes(str(tmp_path)))
        database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")

        def is_reclaimed() -> bool:
            ended = update(jobs_table).where(jobs_table.c.id == id).values(lease_until=now() - 1)
            with database.write() as connection:
                ended = ended.returning(jobs_table.c.attempts)
                return connection.execute(ended).scalar_one() == 2

        wait_for(is_reclaimed)
        database.close()
        assert finished(http, post(http, budget="60%").json()["id"])["status"] == "succeeded"
        wait_for(lambda: solving_processes(str(tmp_path)) == solving)  # the other one has ended
        starts = [line for line in server.log.read_text().splitlines() if "solve started" in line]
        assert [json.loads(line)["job"] == id for line in starts] == [True, False]
        assert http.delete(f"/jobs/{id}").status_code == 202
        wait_for(lambda: not solving_processes(str(tmp_path)))


@pytest.mark.parametrize("has_task", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_solving_process_ends_silently_when_its_worker_is_gone(has_task: bool) -> None:
    """Its stderr is the service's log, which has one JSON object a line."""
    worker_side, expected_plan = socket.socketpair()
    child = [sys.executable, "-m", "remat_server.work.child"]
    command = [*child, str(expected_plan.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[expected_plan.fileno()], stderr=subprocess.PIPE)
    expected_plan.close()
    connection = Connection(worker_side.detach())
    if has_task:
        request = {"graph": chain(30), "budget": "22%", "options": {"strategy": HARD}}
        task = SolveTask(
            kind="solve", memory_bytes=1 << 32, niceness=1, threads=1, time_limit_s=300.0, device=""
        )
        for frame in (task.model_dump_json().encode(), gzip.compress(json.dumps(request).encode())):
            connection.send_bytes(frame)
        for _ in range(2):
            connection.recv_bytes()
    connection.close()
    try:
        assert process.communicate(timeout=PROCESS_LIMIT_S) == (None, b"")
    finally:
        process.kill()


@pytest.mark.slow
def test_sigterm_ends_streams_and_gives_jobs_back(tmp_path: Path) -> None:
    server = servers.start(tmp_path, REMAT_DRAIN_S="0.5", REMAT_CONCURRENT_SOLVES="1")
    kinds: list[str] = []
    with server.http() as http:
        running = post(http, graph=chain(42), budget="22%", options={"strategy": HARD}).json()["id"]
        wait_for(lambda: solving_processes(str(tmp_path)))
        waiting = post(http, budget="66%").json()["id"]

        def watch() -> None:
            with server.http() as http, http.sse(f"/jobs/{running}/events") as source:
                kinds.extend(event.event for event in source)

        watcher = threading.Thread(target=watch)
        watcher.start()
        wait_for(lambda: kinds)
        server.stop(signal.SIGTERM)
        watcher.join(timeout=PROCESS_LIMIT_S)
        assert not watcher.is_alive()
    assert "done" not in kinds
    assert not solving_processes(str(tmp_path))
    log = server.log.read_text()
    assert "graceful shutdown exceeded" not in log
    assert '"released_jobs": 1' in log
    assert "Traceback" not in log
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    with database.read() as connection:
        rows = connection.execute(
            select(jobs_table.c.id, jobs_table.c.status, jobs_table.c.attempts)
        )
        assert {tuple(row) for row in rows} == {(running, "queued", 0), (waiting, "queued", 0)}
        assert leases.worker_count(connection, 1e9) == 0
    database.close()


@pytest.mark.slow
def test_sigterm_finishes_running_jobs_and_starts_none(tmp_path: Path) -> None:
    server = servers.start(tmp_path, REMAT_DRAIN_S="60", REMAT_CONCURRENT_SOLVES="1")
    with server.http() as http:
        short = {"graph": chain(60), "budget": "22%"}
        options = {"strategy": {**HARD, "time_limit": 2.0}}
        running = post(http, **short, options=options).json()["id"]
        waiting = post(http, budget="66%").json()["id"]
        wait_for(lambda: http.get(f"/jobs/{running}").json()["status"] == "running")
    server.stop(signal.SIGTERM)
    assert not solving_processes(str(tmp_path))
    with (
        servers.running(tmp_path, REMAT_CONCURRENT_SOLVES="1") as restarted,
        restarted.http() as http,
    ):
        first = http.get(f"/jobs/{running}").json()
        assert first["status"] == "succeeded"
        assert first["started_at"] < restart_time(restarted.log)
        second = finished(http, waiting)
        assert second["status"] == "succeeded"
        assert second["started_at"] > restart_time(restarted.log)


@pytest.mark.slow
def test_sigterm_releases_jobs_that_take_too_long(tmp_path: Path) -> None:
    server = servers.start(tmp_path, REMAT_DRAIN_S="0.5", REMAT_CONCURRENT_SOLVES="1")
    with server.http() as http:
        limited = {"strategy": {**HARD, "time_limit": 3.0}}
        id = post(http, graph=chain(60), budget="22%", options=limited).json()["id"]
        wait_for(lambda: solving_processes(str(tmp_path)))
    began = time.monotonic()
    server.stop(signal.SIGTERM)
    assert time.monotonic() - began < 100
    with servers.running(tmp_path) as restarted, restarted.http() as http:
        assert finished(http, id)["status"] == "succeeded"


@pytest.mark.slow
def test_a_solve_that_exceeds_its_memory_fails_without_affecting_others(tmp_path: Path) -> None:
    """With an incumbent at that time, the incumbent is the answer, and its stats report the
    limit."""
    settings = {"REMAT_SOLVE_MEMORY_BYTES": "250MiB", "REMAT_CONCURRENT_SOLVES": "2"}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        large = post(http, graph=chain(400), budget="20%", options={"strategy": HARD}).json()["id"]
        small = post(http, budget="70%").json()["id"]
        assert finished(http, small)["status"] == "succeeded"
        ended = finished(http, large, 120)
        if ended["status"] == "failed":
            assert ended["problem"]["type"].endswith(":memory")
            assert "REMAT_SOLVE_MEMORY_BYTES" in ended["problem"]["detail"]
        else:
            plan = http.get(f"/jobs/{large}/result").json()["plan"]
            assert "MemoryError" in plan["stats"]["search_error"]
            assert plan["status"] == "FEASIBLE"
        assert finished(http, post(http, budget="71%").json()["id"])["status"] == "succeeded"


@dataclasses.dataclass
class Holding:
    """A solve that holds this much memory, and sends no message."""

    held_bytes: int
    is_killed: bool = False

    def messages(self) -> list[SolveMessage]:
        return []

    def memory_bytes(self) -> int:
        return self.held_bytes

    def kill(self) -> None:
        self.is_killed = True


def test_a_solve_that_stays_at_its_memory_limit_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python process without memory to raise MemoryError loops for ever."""
    url = f"sqlite:///{tmp_path}/jobs.sqlite"
    settings = Settings(database_url=url, solve_memory_bytes=1 << 28)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock.now)
    worker = workers.Worker(settings, Database(settings.store_url), SimpleNamespace())
    job = leases.ClaimedJob("id", "solve", b"", "", 1, "")
    full, roomy = Holding((1 << 28) - 4096), Holding((1 << 28) - (4 << 20))
    active_runs = [workers.ActiveJob(job, run) for run in (full, roomy)]

    def look(at: float) -> list[str]:
        clock.now = at
        for active in active_runs:
            worker._enforce_limits(active)
        ends = [active.outcome for active in active_runs]
        return [end.problem.type.rpartition(":")[2] if end else "" for end in ends]

    assert look(100.0) == look(109.0) == ["", ""]
    full.held_bytes = 0  # the store has the answer
    assert look(109.5) == ["", ""]
    full.held_bytes = (1 << 28) - 4096
    assert look(110.0) == look(119.9) == ["", ""]
    assert look(120.1) == ["memory", ""]
    assert (full.is_killed, roomy.is_killed) == (True, False)


@dataclasses.dataclass
class Ending(Holding):
    """A solve that reports its progress and its answer at once, and then its process is gone."""

    has_reported: bool = False

    def messages(self) -> list[SolveMessage]:
        if self.has_reported:
            raise SolveLost("ended with code 0")
        self.has_reported = True
        progress = ProgressRecord(phase="solve", elapsed_s=1.0)
        answer = AnswerMessage(summary=(), is_shared=True)
        return [ProgressMessage(progress=progress, is_incumbent=False), (answer, b"the answer")]


def test_an_answer_during_an_outage_of_the_store_is_kept(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/jobs.sqlite")
    worker = workers.Worker(settings, Database(settings.store_url), SimpleNamespace())
    active = workers.ActiveJob(leases.ClaimedJob("id", "solve", b"", "", 1, ""), Ending(0))
    with pytest.raises(OperationalError):  # there is no table of jobs
        worker._read_messages(active)
    assert isinstance(active.outcome, tuple)
    assert active.outcome[1] == b"the answer"


@pytest.mark.slow
def test_a_job_that_loses_every_worker_fails(tmp_path: Path) -> None:
    settings = {"REMAT_LEASE_S": "0.5", "REMAT_ATTEMPTS": "2", "REMAT_CONCURRENT_SOLVES": "1"}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        id = post(http, graph=chain(60), budget="22%", options={"strategy": HARD}).json()["id"]
        for _ in range(2):
            wait_for(lambda: solving_processes(str(tmp_path)))
            os.kill(worker_pid(server), signal.SIGKILL)
            wait_for(lambda: not solving_processes(str(tmp_path)))
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
def test_a_worker_without_its_store_logs_it(tmp_path: Path) -> None:
    nobody = f"postgresql://ann:secret@/name?host={tmp_path}"
    ended = subprocess.run(
        [sys.executable, "-m", "remat_server.work.processes"],
        env={**os.environ, "REMAT_DATABASE_URL": nobody},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
    )
    assert ended.returncode == 1
    (line,) = map(json.loads, ended.stderr.splitlines())
    assert line["event"] == "the worker cannot start"
    assert "does not respond" in line["error"]
    assert "secret" not in ended.stderr


@pytest.mark.slow
def test_a_client_waits_while_the_service_restarts(tmp_path: Path) -> None:
    """Also while a proxy in front of it reports that the service is unavailable."""
    reports: list[remat.Progress] = []
    settings = {"REMAT_LEASE_S": "1", "REMAT_CONCURRENT_SOLVES": "1"}
    graph = GraphRecord.model_validate_json(json.dumps(chain(44))).to_graph()
    hard = remat.Exact(gap=0.0, time_limit=4.0)
    with ExitStack() as stack:
        server = stack.enter_context(servers.running(tmp_path, **settings))
        client = stack.enter_context(server.client())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        plan = pool.submit(client.solve, graph, "22%", hard, progress=reports.append)
        wait_for(lambda: reports)
        server.stop(signal.SIGKILL)
        port = int(server.url.rpartition(":")[2])
        assert any("/events" in path for path in answer_unavailable(port, 3))
        restarted = servers.start(tmp_path, port=port, **settings)
        stack.callback(restarted.stop, signal.SIGKILL)
        solved = plan.result(timeout=PROCESS_LIMIT_S)
    assert solved.peak_bytes <= solved.budget_bytes


def answer_unavailable(port: int, times: int) -> list[str]:
    """Answer a number of requests like a proxy without a server behind it; return their paths."""
    requests: list[str] = []

    class Unavailable(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Unavailable) as proxy:
        proxy.timeout = 30
        for _ in range(times):
            proxy.handle_request()
    return requests


@pytest.mark.slow
def test_an_outage_of_the_store_loses_nothing(tmp_path: Path, postgres_url: str) -> None:
    """The solve goes on, and waiting clients are answered once the store is back."""
    reports: list[remat.Progress] = []
    graph = GraphRecord.model_validate_json(json.dumps(chain(43))).to_graph()
    hard = remat.Exact(gap=0.0, time_limit=8.0)
    with ExitStack() as stack:
        url = stack.enter_context(postgres.fresh_database(postgres_url))
        settings = {"REMAT_DATABASE_URL": url, "REMAT_CONCURRENT_SOLVES": "1"}
        server = stack.enter_context(servers.running(tmp_path, **settings))
        client, http = stack.enter_context(server.client()), stack.enter_context(server.http())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        plan = pool.submit(client.solve, graph, "22%", hard, progress=reports.append)
        wait_for(lambda: reports)
        (solving,) = solving_processes(str(tmp_path))
        with postgres.unreachable(postgres_url, url):
            refused = wait_for(lambda: [a for a in [http.get("/jobs")] if a.status_code != 200])[0]
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:remat:problem:unavailable"
            assert refused.headers["Retry-After"] == "5"
            assert http.get("/readyz").status_code == 503
            assert http.get("/livez").status_code == 200
            time.sleep(1.0)
            assert solving_processes(str(tmp_path)) == {solving}
        solved = plan.result(timeout=PROCESS_LIMIT_S)
        assert solved.peak_bytes <= solved.budget_bytes
        (job,) = http.get("/jobs").json()["jobs"]
        with http.sse(f"/jobs/{job['id']}/events") as source:
            story = [(event.event, event.data) for event in source]
    assert [kind for kind, _ in story].count("status") == 3, "queued, running, succeeded"
    assert len({dataclasses.astuple(report) for report in reports}) == len(reports), (
        "no report is repeated"
    )


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
        job_ids = [http.post("/solve", json=jobs.request_body(i)).json()["id"] for i in range(4)]
        assert {http.get(f"/jobs/{id}").json()["status"] for id in long + job_ids} == {"queued"}
        command = [sys.executable, "-m", "remat.cli", "worker", "--database-url", postgres_url]
        command += ["--concurrent-solves", "1"]
        workers = [subprocess.Popen(command, env=server.environment) for _ in range(2)]
        try:
            wait_for(lambda: len(solving_processes(str(tmp_path))) == 2)
            workers[0].kill()
            assert all(finished(http, id, 120)["status"] == "succeeded" for id in long)
            for id in job_ids:
                finished(http, id, 120)
                jobs.assert_succeeded_once(http, id, plan)
            workers[1].terminate()
            assert workers[1].wait(timeout=PROCESS_LIMIT_S) == 0
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def restart_time(log: Path) -> float:
    """Return the time at which the last server of a log reports its start."""
    from datetime import datetime

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    started = [line["timestamp"] for line in lines if line["event"] == "service started"]
    return datetime.fromisoformat(started[-1]).timestamp()


@pytest.mark.slow
@needs_cbc
def test_a_solve_continues_after_its_solver_is_killed(tmp_path: Path) -> None:
    """The job has a plan; its stats and the log say why it is no better."""
    graph = random_stages(2, 14)
    strategy = remat.Exact(solver="CBC", time_limit=200)
    # Warnings are errors for this process.
    with servers.running(tmp_path, REMAT_SOLVERS="HiGHS,CBC", PYTHONWARNINGS="error") as server:
        with (
            killing_cbc(at_once, server.process.pid) as kills,
            server.client() as client,
            pytest.warns(remat.SolverWarning, match="CBC .* failed or was killed"),
        ):
            solved = client.solve(graph, "60%", strategy)
        log_lines = [
            line for line in server.log.read_text().splitlines() if "SolverWarning" in line
        ]
    assert len(kills.pids) == 1
    assert solved.status is Status.FEASIBLE
    assert solved.peak_bytes <= solved.budget_bytes
    assert "failed or was killed" in str(solved.stats["solver_error"])
    (log_line,) = map(json.loads, log_lines)
    assert log_line["reason"].startswith(str(solved.stats["solver_error"]))
