"""A real server process for tests, and small requests for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from tests.helpers.process_limit import PROCESS_LIMIT_S

from remat.service.client import Client
from remat_server.settings import Settings
from remat_server.store import keys
from remat_server.store.database import Database

T = TypeVar("T")


@dataclass
class Server:
    """`remat serve` as a child process. `log` is the file with its stderr."""

    url: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path

    def client(self, api_key: str | None = None) -> Client:
        """Return the library's client."""
        return Client(self.url, api_key=api_key)

    def http(self, **options: Any) -> httpx2.Client:
        """Return a plain HTTP client."""
        return httpx2.Client(base_url=self.url, timeout=60, **options)

    def add_key(self, name: str) -> str:
        """Create an API key as `remat keys add` does."""
        database = Database(Settings(data_dir=self.environment["REMAT_DATA_DIR"]).store_url)
        with database.write() as connection:
            _, key = keys.add(connection, name)
        database.close()
        return key

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server, and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(timeout=PROCESS_LIMIT_S)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(directory: Path, *arguments: str, port: int | None = None, **settings: str) -> Server:
    """Start a server whose data are in `directory`, and wait until it is ready."""
    port = port or free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REMAT_")}
    environment |= {"REMAT_DATA_DIR": str(directory), "REMAT_PORT": str(port), **settings}
    log = directory / "server.log"
    directory.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "remat.cli", "serve", *arguments],
            env=environment,
            stdout=file,
            stderr=file,
        )
    server = Server(f"http://127.0.0.1:{port}", process, environment, log)
    wait_until_ready(server)
    return server


def wait_until_ready(server: Server, timeout_s: float = PROCESS_LIMIT_S) -> None:
    """Wait until `/readyz` reports that the server is ready; fail with the end of the log."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        try:
            if httpx2.get(f"{server.url}/readyz").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server is not ready:\n{server.log.read_text()[-3000:]}")


@contextmanager
def running(directory: Path, *arguments: str, **settings: str) -> Iterator[Server]:
    """Run a server during the block."""
    server = start(directory, *arguments, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def chain(length: int = 12, size: int = 100) -> dict[str, Any]:
    """Return a bare graph to post: a chain of forward operations, and a backward that reads
    each."""
    operations = [_operation(f"f{i}", [i - 1] if i else [], [i]) for i in range(length)]
    operations.append(_operation("start", [length - 1], [length], recomputable=False))
    for i in range(length):
        number = length + 1 + i
        reads = sorted({number - 1, length - 1 - i})
        operations.append(_operation(f"b{i}", reads, [number], backward=True))
    values = [{"name": f"v{i}", "size_bytes": size} for i in range(2 * length + 1)]
    return {
        "operations": operations,
        "values": values,
        "results": [2 * length],
        "constant_bytes": 0,
        "boundary": length,
    }


def _operation(
    name: str,
    inputs: list[int],
    outputs: list[int],
    backward: bool = False,
    recomputable: bool = True,
) -> dict[str, Any]:
    return {
        "name": name,
        "inputs": inputs,
        "outputs": outputs,
        "cost_s": 1.0,
        "workspace_bytes": 0,
        "backward": backward,
        "recomputable": recomputable,
        "module": "",
    }


def post(http: httpx2.Client, where: str = "/solve", **body: Any) -> httpx2.Response:
    """Post a request with a graph; a small chain by default."""
    return http.post(where, json={"graph": chain(), **body})


def finished(http: httpx2.Client, id: str, timeout_s: float = PROCESS_LIMIT_S) -> dict[str, Any]:
    """Wait until a job has ended, and return it."""
    job: dict[str, Any] = {}
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        job = http.get(f"/jobs/{id}").json()
        if job["status"] not in ("queued", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"the job did not end: {job}")


def wait_for(look: Callable[[], T], timeout_s: float = PROCESS_LIMIT_S) -> T:
    """Wait until the result of `look` is true, and return it."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if value := look():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def solving_processes(owner: str) -> set[int]:
    """Return the pids of processes that solve (and do not merely wait for a job): those whose
    environment or whose parent's name contains `owner`, such as a server's data folder."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command = (stat.parent / "cmdline").read_bytes()
            fields = stat.read_text().rpartition(")")[2].split()
            environ = (stat.parent / "environ").read_bytes()
            environ += Path(f"/proc/{fields[1]}/cmdline").read_bytes()
        except OSError:
            continue
        is_mine = owner.encode() in environ
        nice, state = int(fields[16]), fields[0]
        if is_mine and b"remat_server.work.child" in command and nice > _OWN_NICE and state != "Z":
            pids.add(int(stat.parent.name))
    return pids


_OWN_NICE = os.nice(0)
"""The priority of this process. A process that solves has a lower one than those that wait."""

HARD = {"name": "exact", "gap": 0.0, "time_limit": 300.0}
"""A strategy that takes long."""
