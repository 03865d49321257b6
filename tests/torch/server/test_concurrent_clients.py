"""Many concurrent clients, lost answers and foreign host names, on real servers."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server, finished, post, solving_processes, wait_for
from tests.helpers.training.models import PLAIN

import remat
from remat.service.client import Client
from remat_server.settings import Settings
from remat_server.work import processes

KIB = 1 << 10
MIB = 1 << 20


@pytest.mark.slow
def test_each_job_measures_its_costs_within_its_memory_limit(tmp_path: Path) -> None:
    """Another worker's device has other costs, so the answer is not shared."""
    case = PLAIN["mlp"]()
    trace = json.loads(remat.trace(case.model, case.args, case.kwargs).to_json())
    body = {"trace": trace, "budget": "90%", "options": {"costs": "measure"}}
    limit = 3 << 30
    settings = {"REMAT_SOLVE_MEMORY_BYTES": str(limit)}
    with servers.running(tmp_path, **settings) as server, server.http() as http:
        for _ in range(2):
            job = wait_for(lambda: accepted(http, body))
            assert job is not None
            assert job["status"] == "queued"
            assert wait_for(lambda: limits_of_solves(tmp_path)) == [limit]
            assert finished(http, job["id"])["status"] == "succeeded"


def accepted(http: httpx2.Client, body: dict[str, object]) -> dict[str, str] | None:
    """Return the job; None while no worker has reported the devices it can measure on."""
    response = http.post("/solve", json=body)
    assert response.status_code == 202 or "no worker" in response.json()["detail"]
    return response.json() if response.status_code == 202 else None


def limits_of_solves(folder: Path) -> list[int] | None:
    """Return RLIMIT_DATA of the processes that solve, once each has one."""
    data_limits = [data_limit(pid) for pid in solving_processes(str(folder))]
    limits = [limit for limit in data_limits if limit is not None]
    return limits if len(limits) == len(data_limits) else None


def data_limit(pid: int) -> int | None:
    """Return RLIMIT_DATA of a process, where it has one."""
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max data size"):
            limit = line.split()[3]
            return int(limit) if limit.isdecimal() else None
    return None


# -- concurrent requests ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_bytes_of_concurrent_bodies_are_limited(tmp_path: Path) -> None:
    """To four of the largest: a further client has to retry, and small bodies still pass."""
    settings = {"REMAT_BODY_BYTES": str(256 * KIB)}
    with ExitStack() as stack:
        server = stack.enter_context(servers.running(tmp_path, **settings))
        http = stack.enter_context(server.http())
        body = b'{"graph": 1}' + b" " * (100 * KIB)
        sending: list[socket.socket] = []

        def looked() -> httpx2.Response | None:
            for sender in filter(
                is_answered, list(sending)
            ):  # the body of this request was there first
                sending.remove(sender)
            while len(sending) < 4:
                sending.append(stack.enter_context(connection(server)))
                sending[-1].sendall(posted(255 * KIB) + b" " * (250 * KIB))
            return answered(http, body, 503)

        refused = wait_for(looked)
        assert refused.headers["Retry-After"] == "2"
        assert "large requests" in refused.json()["detail"]
        assert post(http, budget="70%").status_code == 202
        for sender in sending:
            sender.close()
        wait_for(lambda: answered(http, body, 422))


def is_answered(sending: socket.socket) -> bool:
    return bool(select.select([sending], [], [], 0)[0])


def answered(http: httpx2.Client, body: bytes, status: int) -> httpx2.Response | None:
    """Return the answer once it has this status."""
    response = http.post("/solve", content=body, headers={"Content-Type": "application/json"})
    return response if response.status_code == status else None


def posted(length: int) -> bytes:
    """Return the head of a request with a body."""
    head = "POST /solve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@contextmanager
def connection(server: Server) -> Iterator[socket.socket]:
    port = int(server.url.rpartition(":")[2])
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as plain:
        yield plain


@pytest.mark.slow
def test_the_number_of_event_streams_is_limited(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(servers.running(tmp_path, "--workers", "0"))
        http = stack.enter_context(server.http())
        path = f"/jobs/{post(http, budget='70%').json()['id']}/events"
        watching = []
        for _ in range(200):
            watching.append(stack.enter_context(connection(server)))
            watching[-1].sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        for watcher in watching:
            assert select.select([watcher], [], [], 60)[0]
            assert b" 200 " in watcher.recv(100)
        refused = http.get(path)
        assert refused.status_code == 503
        assert "200 clients watch" in refused.json()["detail"]
        assert http.get("/jobs").status_code == 200
        for watcher in watching:
            watcher.close()
        wait_for(lambda: is_watched(http, path))


def is_watched(http: httpx2.Client, path: str) -> bool:
    with http.stream("GET", path) as response:
        return response.status_code == 200


# -- lost answers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_waiting_client_sends_one_request(tmp_path: Path) -> None:
    """As long as the service reports that it is alive."""
    with ExitStack() as stack:
        server = stack.enter_context(servers.running(tmp_path, "--workers", "0"))
        http, client = stack.enter_context(server.http()), stack.enter_context(server.client())
        id = post(http, budget="70%").json()["id"]
        requests: list[Exception] = []

        def wait() -> None:
            try:
                client.finish(id)
            except remat.RematError as error:
                requests.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(4.5)
        client.cancel(id)
        waiting.join(30)
        assert "cancelled" in str(requests[0])
        lines = map(json.loads, server.log.read_text().splitlines())
        watched = [line for line in lines if line.get("path", "").endswith("/events")]
        assert len(watched) == 1


@pytest.mark.slow
def test_a_cancellation_with_a_lost_answer_deletes_no_job(tmp_path: Path) -> None:
    """The second DELETE of a job deletes it."""
    with ExitStack() as stack:
        server = stack.enter_context(servers.running(tmp_path, "--workers", "0"))
        http = stack.enter_context(server.http())
        url, deleted = stack.enter_context(losing_delete_answers(server))
        client = stack.enter_context(Client(url))
        id = post(http, budget="70%").json()["id"]
        client.cancel(id)
        assert len(deleted) == 1
        assert http.get(f"/jobs/{id}").json()["status"] == "cancelled"
        deleted.clear()
        client.cancel(id)
        assert len(deleted) == 1
        assert http.get(f"/jobs/{id}").status_code == 404
        with pytest.raises(remat.ServiceError, match="you have no job"):
            client.cancel(id)


@contextmanager
def losing_delete_answers(server: Server) -> Iterator[tuple[str, list[str]]]:
    """Run a proxy that loses the first answer of each DELETE; yield its URL and the deleted
    paths."""
    deleted: list[str] = []

    class LosingProxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            response = httpx2.get(server.url + self.path)
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def do_DELETE(self) -> None:
            httpx2.delete(server.url + self.path)
            deleted.append(self.path)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), LosingProxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}", deleted
        proxy.shutdown()


# -- host names, and failing processes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("192.0.2.7:8000", 200),
        ("[2001:db8::1]:8000", 200),
        ("gpu-box:8000", 200),
        ("evil.example", 400),
        ("evil.example:8000", 400),
        ("192.0.2.7.evil.example", 400),
        ("evil.", 400),
    ],
)
def test_foreign_host_names_are_refused_where_no_key_is_needed(
    anonymous: Server, host: str, status: int
) -> None:
    with anonymous.http() as http:
        assert http.get("/jobs", headers={"Host": host}).status_code == status


@pytest.fixture(scope="module")
def anonymous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"REMAT_ALLOW_ANONYMOUS": "true", "REMAT_HOST": "0.0.0.0"}
    where = tmp_path_factory.mktemp("anonymous")
    with servers.running(where, "--workers", "0", **settings) as server:
        yield server


def test_a_worker_that_cannot_be_started_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may have no memory for a process for a while."""
    started: list[asyncio.subprocess.Process] = []

    class Short(processes.SupervisedWorker):
        async def _spawn(self) -> asyncio.subprocess.Process:
            if len(started) == 1 and not failed:
                failed.append(True)
                raise BlockingIOError("Resource temporarily unavailable")
            made = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "pass", stdin=subprocess.DEVNULL
            )
            started.append(made)
            return made

    async def keep() -> None:
        local_placement = Short(Settings(data_dir=tmp_path))
        await local_placement.start()
        for _ in range(600):
            if len(started) >= 2:
                break
            await asyncio.sleep(0.05)
        await local_placement.stop()

    failed: list[bool] = []
    monkeypatch.setattr(processes, "_RESTART_S", 0.01)
    asyncio.run(keep())
    assert failed
    assert len(started) >= 2
