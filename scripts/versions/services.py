"""Run the services of docker/compose.yaml, and see that they do what docker/README.md says.

    unshare --net python3 -m scripts.versions.services server|worker-gpu

By Docker's compose on podman's socket; `scripts.versions.containers` has made the images.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SOCKET = Path("/run/podman.sock")
URL = "http://127.0.0.1:8000"
_START_S = 300.0
_SCRAPED_S = 60.0


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with engine(), tempfile.TemporaryDirectory() as folder:
        compose = Compose(Path(folder) / "docker")
        shutil.copytree(DOCKER, compose.folder)
        try:
            {"server": check_server, "worker-gpu": check_worker}[sys.argv[1]](compose)
        except BaseException:
            compose("--profile", "*", "logs", "--tail", "50")
            raise
        finally:
            compose("--profile", "*", "down", "--volumes", "--timeout", "5")


# -- what is checked ------------------------------------------------------------------------------


def check_server(compose: Compose) -> None:
    """The API with SQLite; then with PostgreSQL, and seen by Prometheus."""
    refused = compose.ended("run", "--rm", "-T", "api")
    assert refused.returncode != 0
    assert "remat keys add NAME" in refused.stderr, refused.stderr
    key = compose.told("run", "--rm", "-T", "api", "keys", "add", "me").strip()
    compose.up("api")
    assert get("/livez") == {"status": "ok"}
    assert get("/readyz") == {"status": "ok"}
    has_little_power(compose, "api")
    assert "No module named 'torch'" in compose.ended(*_in("api"), "import torch").stderr
    solves(compose, key)
    assert [job["status"] for job in get("/jobs", key)["jobs"]] == ["succeeded"]
    ends_in_order(compose, "api", "service stopped")
    compose("down", "--volumes")

    password = secrets.token_hex(24)
    key = with_postgres(compose, password)
    assert '"store": "postgresql"' in compose.told("logs", "--no-log-prefix", "api")
    solves(compose, key)
    count = ["psql", "--username=remat", "--tuples-only", "--command", "SELECT count(*) FROM jobs"]
    assert compose.told("exec", "-T", "postgres", *count).strip() == "1"

    key = compose.told("run", "--rm", "-T", "api", "keys", "add", "prometheus")
    (compose.folder / "secrets").mkdir(mode=0o700)
    (compose.folder / "secrets/metrics.key").write_text(key)
    compose.up("prometheus")
    wait_until_scraped(compose)
    dashboard_is_understood(compose)
    ends_in_order(compose, "api", "service stopped")
    ends_in_order(compose, "postgres", "database system is shut down")


def check_worker(compose: Compose) -> None:
    """A worker measures on its processor: there is no GPU, and none is asked for."""
    # The rest of the service stays as it is.
    (compose.folder / "compose.override.yaml").write_text(
        "services: {worker-gpu: {deploy: {resources: {reservations: !reset null}}}}\n"
    )
    key = with_postgres(compose, secrets.token_hex(24))
    compose.up("worker-gpu")
    has_little_power(compose, "worker-gpu")
    script = _MEASURE.format(key=key)
    print(compose.told(*_in("worker-gpu"), script), flush=True)
    ends_in_order(compose, "worker-gpu", "worker stopped")


def with_postgres(compose: Compose, password: str) -> str:
    """Start the API with the store in PostgreSQL, as README.md says; gives a key."""
    (compose.folder / ".env").write_text(
        "COMPOSE_PROFILES=postgres\n"
        f"POSTGRES_PASSWORD={password}\n"
        "REMAT_DATABASE_URL=postgresql://remat:${POSTGRES_PASSWORD}@postgres:5432/remat\n"
    )
    compose.up("postgres")
    key = compose.told("run", "--rm", "-T", "api", "keys", "add", "me").strip()
    compose.up("api")
    return key


def has_little_power(compose: Compose, service: str) -> None:
    """What compose.yaml says of users, capabilities and the file system holds in the container."""
    told = json.loads(compose.told(*_in(service), _POWERS))
    assert told["user"] == told["group"] == 10001, told
    assert told["capabilities"] == 0, told
    assert told["written"] == ["/data", "/tmp"], told
    assert told["no_new_privileges"] == 1, told
    assert told["first"] not in ("remat", "python"), "no init reaps what is left"


def solves(compose: Compose, key: str) -> None:
    """The client of the image's own package has a graph solved."""
    print(compose.told(*_in("api"), _SOLVE.format(key=key)), flush=True)


def ends_in_order(compose: Compose, service: str, last_words: str) -> None:
    """SIGTERM ends a service that has nothing to do at once, and it says so."""
    began = time.monotonic()
    compose("stop", service)
    took_s = time.monotonic() - began
    name = f"remat-{service}-1"
    state = ["podman", "inspect", "--format", "{{.State.ExitCode}}", name]
    code = int(subprocess.run(state, check=True, stdout=subprocess.PIPE, text=True).stdout)
    logs = compose.ended("logs", "--no-log-prefix", service)
    assert code in (0, 143), (code, logs.stdout[-2000:])
    assert last_words in logs.stdout + logs.stderr, logs.stdout[-2000:]
    assert took_s < 30, took_s
    print(f"{service} ended with {code} after {took_s:.1f} s", flush=True)


def wait_until_scraped(compose: Compose) -> None:
    """Prometheus reads the API's metrics, with its own key."""
    until = time.monotonic() + _SCRAPED_S
    while time.monotonic() < until:
        found = query(compose, 'up{job="remat"}')["data"]["result"]
        if found and found[0]["value"][1] == "1":
            return
        time.sleep(2)
    raise AssertionError("Prometheus does not reach the API's metrics")


def dashboard_is_understood(compose: Compose) -> None:
    """Every expression that Grafana would ask for is one that Prometheus answers."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    answers = [query(compose, re.sub(r"\$\w+", "1m", expression)) for expression in asked]
    assert {answer["status"] for answer in answers} == {"success"}
    filled = sum(bool(answer["data"]["result"]) for answer in answers)
    print(f"{len(asked)} queries of the dashboard are answered, {filled} with figures", flush=True)
    assert filled > 0


def query(compose: Compose, expression: str) -> dict:
    """What Prometheus answers, asked from the API's container: it has no port for others."""
    return json.loads(compose.told(*_in("api"), _QUERY.format(expression=expression)))


# -- what runs in the containers ------------------------------------------------------------------


def _in(service: str) -> tuple[str, ...]:
    """Python in a service's container, but for the code."""
    return "exec", "-T", service, "python", "-c"


_POWERS = """
import json, os, re
status = dict(re.findall(r"^(\\w+):\\s*(.*)$", open("/proc/self/status").read(), re.M))
written = []
for folder in ("/", "/data", "/opt/remat", "/tmp", "/usr"):
    try:
        open(f"{folder}/written", "w").close()
        written.append(folder)
    except OSError:
        pass
print(json.dumps({
    "user": os.getuid(),
    "group": os.getgid(),
    "capabilities": int(status["CapBnd"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "written": written,
    "first": open("/proc/1/comm").read().strip(),
}))
"""

_SOLVE = """
import networkx, remat
graph = networkx.DiGraph()
for i in range(12):
    graph.add_node(f"f{{i}}", cost=1.0, size=100)
    graph.add_node(f"b{{i}}", cost=1.0, size=100, backward=True)
for i in range(12):
    graph.add_edge(f"f{{i}}", f"b{{i}}")
    if i:
        graph.add_edge(f"f{{i - 1}}", f"f{{i}}")
        graph.add_edge(f"b{{i}}", f"b{{i - 1}}")
graph.add_edge("f11", "b11")
client = remat.Client("http://api:8000", api_key={key!r})
plan = client.solve(remat.Graph.from_networkx(graph), "70%")
assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
print(plan)
"""

_MEASURE = """
import torch, remat
layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8))
model, x = torch.nn.Sequential(*layers), torch.randn(4096, 64)
trace = remat.trace(model, (x,), differentiate="all")
client = remat.Client("http://api:8000", api_key={key!r})
plan = client.solve(trace, "80%", costs="measure")
assert plan.peak_bytes <= plan.budget_bytes
print(plan)
"""

_QUERY = """
import urllib.parse, urllib.request
query = urllib.parse.urlencode({{"query": {expression!r}}})
url = "http://prometheus:9090/api/v1/query?" + query
print(urllib.request.urlopen(url, timeout=30).read().decode())
"""


# -- compose and its engine -----------------------------------------------------------------------


class Compose:
    """`docker compose` in a copy of docker/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str) -> None:
        print("$ docker compose", *arguments, flush=True)
        subprocess.run(["docker-compose", *arguments], cwd=self.folder, env=_DOCKER, check=True)

    def ended(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """How a command ended, and what it said."""
        command = ["docker-compose", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=_DOCKER, capture_output=True, text=True, timeout=_START_S
        )

    def told(self, *arguments: str) -> str:
        """What a command prints that must succeed."""
        done = self.ended(*arguments)
        assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    def up(self, service: str) -> None:
        """Start a service, and wait until it is healthy."""
        self("up", "--detach", "--no-build", "--wait", service)


_DOCKER = {**os.environ, "DOCKER_HOST": f"unix://{SOCKET}"}


@contextmanager
def engine() -> Iterator[None]:
    """podman's socket, and its health checks, which otherwise are systemd's to run."""
    ended = threading.Event()

    def check_health() -> None:
        while not ended.wait(1.0):
            listed = subprocess.run(["podman", "ps", "--quiet"], stdout=subprocess.PIPE, text=True)
            for id in listed.stdout.split():
                check = ["podman", "healthcheck", "run", id]
                subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    service = subprocess.Popen(
        ["podman", "system", "service", "--time=0", f"unix://{SOCKET}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    health = threading.Thread(target=check_health)
    health.start()
    try:
        until = time.monotonic() + 30
        while not SOCKET.exists() and time.monotonic() < until:
            time.sleep(0.1)
        yield
    finally:
        ended.set()
        health.join()
        service.terminate()
        service.wait()


def get(path: str, key: str = "") -> dict:
    """What the API answers on the host's port."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(URL + path, headers=headers)) as told:
        return json.load(told)


if __name__ == "__main__":
    main()
