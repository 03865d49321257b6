"""Run the services of docker/compose.yaml, and check them against docker/README.md.

    unshare --net python3 -m scripts.versions.services server|worker-gpu

It uses Docker's compose on podman's socket. `scripts.versions.containers` makes the images.
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


# -- checks ---------------------------------------------------------------------------------------


def check_server(compose: Compose) -> None:
    """Check the API with SQLite, then with PostgreSQL and Prometheus."""
    refused = compose.try_run("run", "--rm", "-T", "api")
    assert refused.returncode != 0
    assert "remat keys add NAME" in refused.stderr, refused.stderr
    key = compose.output("run", "--rm", "-T", "api", "keys", "add", "me").strip()
    compose.up("api")
    assert get("/livez") == {"status": "ok"}
    assert get("/readyz") == {"status": "ok"}
    check_privileges(compose, "api")
    assert "No module named 'torch'" in compose.try_run(*_in("api"), "import torch").stderr
    check_solving(compose, key)
    assert [job["status"] for job in get("/jobs", key)["jobs"]] == ["succeeded"]
    check_clean_stop(compose, "api", "service stopped")
    compose("down", "--volumes")

    password = secrets.token_hex(24)
    key = with_postgres(compose, password)
    assert '"store": "postgresql"' in compose.output("logs", "--no-log-prefix", "api")
    check_solving(compose, key)
    count = ["psql", "--username=remat", "--tuples-only", "--command", "SELECT count(*) FROM jobs"]
    assert compose.output("exec", "-T", "postgres", *count).strip() == "1"

    key = compose.output("run", "--rm", "-T", "api", "keys", "add", "prometheus")
    (compose.folder / "secrets").mkdir(mode=0o700)
    (compose.folder / "secrets/metrics.key").write_text(key)
    compose.up("prometheus")
    wait_until_scraped(compose)
    check_dashboard(compose)
    check_clean_stop(compose, "api", "service stopped")
    check_clean_stop(compose, "postgres", "database system is shut down")


def check_worker(compose: Compose) -> None:
    """Check a worker that measures costs on the CPU, with the request for a GPU removed."""
    # The rest of the service's definition is unchanged.
    (compose.folder / "compose.override.yaml").write_text(
        "services: {worker-gpu: {deploy: {resources: {reservations: !reset null}}}}\n"
    )
    key = with_postgres(compose, secrets.token_hex(24))
    compose.up("worker-gpu")
    check_privileges(compose, "worker-gpu")
    script = _MEASURE.format(key=key)
    print(compose.output(*_in("worker-gpu"), script), flush=True)
    check_clean_stop(compose, "worker-gpu", "worker stopped")


def with_postgres(compose: Compose, password: str) -> str:
    """Start the API with its store in PostgreSQL, as README.md describes; return an API key."""
    (compose.folder / ".env").write_text(
        "COMPOSE_PROFILES=postgres\n"
        f"POSTGRES_PASSWORD={password}\n"
        "REMAT_DATABASE_URL=postgresql://remat:${POSTGRES_PASSWORD}@postgres:5432/remat\n"
    )
    compose.up("postgres")
    key = compose.output("run", "--rm", "-T", "api", "keys", "add", "me").strip()
    compose.up("api")
    return key


def check_privileges(compose: Compose, service: str) -> None:
    """Check user, capabilities and writable folders of a container against compose.yaml."""
    process = json.loads(compose.output(*_in(service), _PRIVILEGES))
    assert process["user"] == process["group"] == 10001, process
    assert process["capabilities"] == 0, process
    assert process["written"] == ["/data", "/tmp"], process
    assert process["no_new_privileges"] == 1, process
    assert process["first"] not in ("remat", "python"), "no init process reaps orphans"


def check_solving(compose: Compose, key: str) -> None:
    """Solve a graph through the API, with the client of the image's own package."""
    print(compose.output(*_in("api"), _SOLVE.format(key=key)), flush=True)


def check_clean_stop(compose: Compose, service: str, last_words: str) -> None:
    """Check that an idle service stops on SIGTERM within 30 s, and logs its last words."""
    began = time.monotonic()
    compose("stop", service)
    took_s = time.monotonic() - began
    name = f"remat-{service}-1"
    state = ["podman", "inspect", "--format", "{{.State.ExitCode}}", name]
    code = int(subprocess.run(state, check=True, stdout=subprocess.PIPE, text=True).stdout)
    logs = compose.try_run("logs", "--no-log-prefix", service)
    assert code in (0, 143), (code, logs.stdout[-2000:])
    assert last_words in logs.stdout + logs.stderr, logs.stdout[-2000:]
    assert took_s < 30, took_s
    print(f"{service} ended with {code} after {took_s:.1f} s", flush=True)


def wait_until_scraped(compose: Compose) -> None:
    """Wait until Prometheus reads the API's metrics with its own key."""
    until = time.monotonic() + _SCRAPED_S
    while time.monotonic() < until:
        result = query(compose, 'up{job="remat"}')["data"]["result"]
        if result and result[0]["value"][1] == "1":
            return
        time.sleep(2)
    raise AssertionError("Prometheus does not reach the API's metrics")


def check_dashboard(compose: Compose) -> None:
    """Check that Prometheus answers every expression of Grafana's dashboard."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    answers = [query(compose, re.sub(r"\$\w+", "1m", expression)) for expression in expressions]
    assert {answer["status"] for answer in answers} == {"success"}
    filled = sum(bool(answer["data"]["result"]) for answer in answers)
    print(
        f"{len(expressions)} queries of the dashboard are answered, {filled} with figures",
        flush=True,
    )
    assert filled > 0


def query(compose: Compose, expression: str) -> dict:
    """Return Prometheus's answer to a query, sent from the API's container.

    Prometheus has no port on the host.
    """
    return json.loads(compose.output(*_in("api"), _QUERY.format(expression=expression)))


# -- code that runs in the containers -------------------------------------------------------------


def _in(service: str) -> tuple[str, ...]:
    """Return compose's arguments to run Python code in a service's container, without the code."""
    return "exec", "-T", service, "python", "-c"


_PRIVILEGES = """
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

    def try_run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a compose command; return its exit code and output, whether it failed or not."""
        command = ["docker-compose", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=_DOCKER, capture_output=True, text=True, timeout=_START_S
        )

    def output(self, *arguments: str) -> str:
        """Return the output of a compose command, which must succeed."""
        completed = self.try_run(*arguments)
        assert completed.returncode == 0, (
            arguments,
            completed.stdout[-2000:],
            completed.stderr[-4000:],
        )
        return completed.stdout

    def up(self, service: str) -> None:
        """Start a service and wait until it is healthy."""
        self("up", "--detach", "--no-build", "--wait", service)


_DOCKER = {**os.environ, "DOCKER_HOST": f"unix://{SOCKET}"}


@contextmanager
def engine() -> Iterator[None]:
    """Run podman's socket, and its health checks, which systemd would run on other machines."""
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
    """Return the API's JSON answer to a GET request on the host's port."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(URL + path, headers=headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
