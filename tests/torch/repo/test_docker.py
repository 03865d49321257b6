"""`docker/` agrees with the package, as far as no container engine is needed to check it. The
images are built and run by `make test-versions`: scripts/versions/containers.py."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.helpers.paths import ROOT
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server, finished, post
from tests.helpers.training.models import gpt2

import remat
from remat.limits.budget import Budget
from remat_server.settings import Settings

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/dashboard.json").read_text())
TARGET_OF_SERVICE = {"api": "server", "worker-gpu": "worker-gpu"}
"""The services that run remat's images, with their build targets."""

each_service = pytest.mark.parametrize("name", SERVICES)
each_remat_service = pytest.mark.parametrize("name", TARGET_OF_SERVICE)
each_target = pytest.mark.parametrize("target", TARGET_OF_SERVICE.values())


# -- the images -------------------------------------------------------------------------------


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    command = [hadolint, "--no-color", DOCKER / "Dockerfile"]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (0, ""), completed.stdout + completed.stderr


@each_target
def test_images_run_as_an_unprivileged_user(target: str) -> None:
    stage = stages()[target]
    assert stage["USER"] == "10001:10001"
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["VOLUME"] == '["/data"]'
    assert json.loads(stage["ENTRYPOINT"]) == ["remat"]
    assert json.loads(stage["CMD"]) == ["serve" if target == "server" else "worker"]
    assert "/opt/remat/healthcheck.py" in stage["HEALTHCHECK"]
    assert "--start-interval" not in stage["HEALTHCHECK"], (
        "builders of 2023 refuse it; 5 s is Docker's"
    )
    assert "PATH=/opt/remat/bin:$PATH" in stage["ENV"].split()
    assert "org.opencontainers.image.licenses" in stage["LABEL"]


def test_copied_files_exist_and_are_not_ignored() -> None:
    not_ignored = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        copied |= {part for part in line.split()[:-1] if not part.startswith("--")}
    assert copied == not_ignored
    for path in copied:
        assert (ROOT / path).exists(), path


def test_only_the_servers_image_lacks_torch() -> None:
    assert dockerfile_requirements("server.txt") == dockerfile_requirements("worker.txt") - {
        line for line in dockerfile_requirements("worker.txt") if line.startswith("torch")
    }
    assert any(line.startswith("torch") for line in dockerfile_requirements("worker.txt"))


def test_versions_in_the_images_agree() -> None:
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE)) == {remat.__version__}


def test_scripts_of_the_images_run_on_the_images_python() -> None:
    for name in ("healthcheck.py", "requirements.py"):
        ast.parse((DOCKER / name).read_text(), feature_version=(3, 12))


# -- compose ----------------------------------------------------------------------------------


@each_service
def test_services_have_few_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "cap_add" not in service
    assert int(service["user"].partition(":")[0]) > 0
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
    for mount in service["tmpfs"]:
        assert set(re.findall(r"(\w+)=", mount)) <= {"mode", "size"}, "podman knows no others"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"].endswith("s")
    limits = service["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    for port in service.get("ports", ()):
        assert interpolated(port).startswith("127.0.0.1:")


@each_service
def test_references_between_services_exist(name: str) -> None:
    service = SERVICES[name]
    for mount in service.get("volumes", ()):
        source, _, rest = mount.partition(":")
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
            assert rest.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]
    for secret in service.get("secrets", ()):
        assert secret in COMPOSE["secrets"]
    profiles = set(service.get("profiles", ()))
    for other, condition in service.get("depends_on", {}).items():
        assert condition["condition"] == "service_healthy"
        needed = set(SERVICES[other].get("profiles", ()))
        is_there = not needed or (profiles and profiles <= needed)
        assert is_there or condition["required"] is False, f"{other} may not be on"
    image = service["image"]
    if name in TARGET_OF_SERVICE:
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
        assert build["target"] in stages()
    else:
        assert re.search(r":v?\d+\.\d+", image), f"{image} has no version"


def test_every_volume_is_used() -> None:
    used = {m.partition(":")[0] for s in SERVICES.values() for m in s.get("volumes", ())}
    assert set(COMPOSE["volumes"]) == {name for name in used if not name.startswith(".")}


@each_remat_service
def test_limits_of_the_service_fit_its_container(name: str) -> None:
    service = SERVICES[name]
    settings = settings_of(service)
    limits = service["deploy"]["resources"]["limits"]
    solves_bytes = settings.concurrent_solves * settings.solve_memory_bytes
    memory = interpolated(limits["memory"])
    memory_bytes = Budget.parse(memory.upper() + "iB").size_bytes
    assert memory_bytes is not None
    assert solves_bytes + (1 << 30) <= memory_bytes
    threads = settings.concurrent_solves * settings.threads_per_solve
    assert threads <= float(interpolated(limits["cpus"]))
    assert float(service["stop_grace_period"].removesuffix("s")) >= settings.drain_s + 20 + 5
    assert service["user"] == stages()[TARGET_OF_SERVICE[name]]["USER"]


def test_the_address_of_the_store_is_composed() -> None:
    assert settings_of(SERVICES["api"]).store_url.startswith("sqlite:////data/")
    example = dict(
        line.removeprefix("#").split("=", 1)
        for line in (DOCKER / "env.example").read_text().splitlines()
        if re.match(r"#[A-Z_]+=", line)
    )
    database = SERVICES["postgres"]["environment"]
    for name in TARGET_OF_SERVICE:
        variables = {"POSTGRES_PASSWORD": "secret"}
        variables["REMAT_DATABASE_URL"] = interpolated(example["REMAT_DATABASE_URL"], variables)
        url = settings_of(SERVICES[name], variables).store_url
        user, name_ = database["POSTGRES_USER"], database["POSTGRES_DB"]
        assert url == f"postgresql://{user}:secret@postgres:5432/{name_}"
    assert "is-not-set" in settings_of(SERVICES["worker-gpu"]).store_url


def test_every_named_setting_exists() -> None:
    fields = {f"REMAT_{name.upper()}" for name in Settings.model_fields}
    for path in [*DOCKER.rglob("*"), ROOT / ".dockerignore"]:
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".env":
            named = set(re.findall(r"\bREMAT_[A-Z_]*[A-Z]\b", path.read_text()))
            assert named <= fields, path


def test_every_variable_of_compose_is_explained() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (DOCKER / "compose.yaml").read_text()))
    shown = set(re.findall(r"^#([A-Z_]+)=", (DOCKER / "env.example").read_text(), re.MULTILINE))
    assert used <= shown
    assert shown - used == {"COMPOSE_PROFILES"}


# -- monitoring -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without torch, and without everything else that the server's image lacks."""
    hooks = tmp_path_factory.mktemp("hooks")
    (hooks / "sitecustomize.py").write_text(ABSENT.format(absent=sorted(not_in_the_image())))
    path = os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with servers.running(tmp_path_factory.mktemp("service"), PYTHONPATH=path) as running:
        yield running


@pytest.mark.slow
def test_the_dashboard_shows_existing_metrics(server: Server) -> None:
    with server.http() as http:
        for _ in range(2):  # the second request is answered from the store
            assert finished(http, post(http, budget="70%").json()["id"])["status"] == "succeeded"
        text = http.get("/metrics").text
    labels_by_metric: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\w+)(?:\{(.*)\})? ", line):
            labels_by_metric.setdefault(match[1], set()).update(
                re.findall(r'(\w+)="', match[2] or "")
            )
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    for expression in shown:
        for name, selector in re.findall(r"\b((?:remat|process)_\w+)(?:\{(.*?)\})?", expression):
            assert name in labels_by_metric, expression
            labels = set(re.findall(r"(\w+)=", selector))
            assert labels <= labels_by_metric[name] | {"job"}, expression
            for group in re.findall(r"by \(([\w, ]+)\)", expression):
                assert set(group.split(", ")) <= labels_by_metric[name], expression
        assert expression.count("(") == expression.count(")")
    text = " ".join(shown)
    for name in labels_by_metric:
        if name.startswith("remat_") and not name.endswith("_created"):
            assert re.sub("_(bucket|count|sum)$", "", name) in text, f"{name} is not shown"


def test_grafana_finds_its_dashboards() -> None:
    grafana = SERVICES["grafana"]
    mounted = dict(mount.split(":")[:2][::-1] for mount in grafana["volumes"])
    provisioning = DOCKER / mounted["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards/remat.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DOCKER / mounted[str(home.parent)] / home.name).exists()


def test_prometheus_authenticates_with_the_key() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    job = config["scrape_configs"][0]
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert job["static_configs"][0]["targets"] == ["api:8000"]
    assert f"COPY {COMPOSE['secrets'][secret]['file']}" not in DOCKERFILE


# -- the server's image, without an engine ---------------------------------------------------------


@pytest.mark.slow
def test_the_server_runs_without_torch(server: Server) -> None:
    case = gpt2(layers=1, dropout=0.0)
    trace = remat.trace(case.model, case.args, case.kwargs)
    with server.client() as client:
        plan = client.solve(trace, "85%", remat.Auto(gap=0.02), costs="roofline:h200")
        assert plan.peak_bytes <= plan.budget_bytes
        with pytest.raises(remat.ServiceError, match="no worker"):
            client.solve(trace, "85%", costs="measure")


@pytest.mark.slow
def test_torch_is_absent_in_that_environment(server: Server) -> None:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=server.environment)

    assert "No module named 'torch'" in run("import torch").stderr
    imports = "import remat_server.http.app, remat_server.work.child, remat.cli, psycopg"
    assert run(imports).returncode == 0
    assert (
        run("from remat_server.work import devices; print(devices.measurable_devices())").stdout
        == "()\n"
    )


def test_a_user_without_a_home_can_run_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_DATA_HOME", "REMAT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert Settings().store_url == "sqlite:////var/lib/remat/jobs.sqlite"


@pytest.mark.slow
def test_the_service_writes_only_to_its_volumes() -> None:
    """As `docker run --read-only` with the image's settings: first a key, then the service.

    Where we are root and others may read our Python, as the image's user, who has no home.
    """
    with tempfile.TemporaryDirectory(prefix="remat-docker-") as scratch:
        data, temporary = Path(scratch) / "data", Path(scratch) / "tmp"
        (Path(scratch) / "sitecustomize.py").write_text(READ_ONLY.format(allowed=scratch))
        Path(scratch).chmod(0o755)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([scratch, *filter(None, sys.path)]),
            "TMPDIR": str(temporary),
            **image_environment("server"),
            "REMAT_PORT": str(servers.free_port()),
            "REMAT_ALLOWED_HOSTS": "api,remat.example.org",
            "REMAT_DATA_DIR": str(data),
        }
        as_nobody = runs_as_nobody(environment)
        for folder in (data, temporary):
            folder.mkdir()
            if as_nobody:
                os.chown(folder, as_nobody["user"], as_nobody["group"])

        def remat_(*arguments: str) -> list[Any]:
            return [sys.executable, "-m", "remat.cli", *arguments]

        def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
            captured: dict[str, Any] = {"capture_output": True, "text": True, **as_nobody}
            return subprocess.run(remat_(*arguments), cwd="/", env=environment, **captured)

        refused = ended("serve")
        assert refused.returncode != 0
        assert refused.stderr.splitlines()[-1].startswith("remat: 0.0.0.0 can be reached")
        assert "remat keys add NAME" in refused.stderr
        assert "Traceback" not in refused.stderr
        added = ended("keys", "add", "prometheus")
        assert added.returncode == 0, added.stderr
        key = added.stdout.strip()
        log = Path(scratch) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                remat_("serve"), cwd="/", env=environment, stdout=file, stderr=file, **as_nobody
            )
        url = f"http://127.0.0.1:{environment['REMAT_PORT']}"
        server = Server(url, process, environment, log)
        try:
            servers.wait_until_ready(server)
            with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
                finished_job = finished(http, post(http, budget="70%").json()["id"])
                metrics = http.get("/metrics", headers={"Host": "api:8000"})
            assert finished_job["status"] == "succeeded", log.read_text()
            assert metrics.status_code == 200
            for what in ("api", "worker"):
                health_report = health(what, environment)
                assert health_report.returncode == 0, health_report.stderr
            assert server.stop() in (0, -signal.SIGTERM)
            assert "service stopped" in log.read_text()
        finally:
            process.kill()
            process.wait()
        assert "Read-only" not in log.read_text()
        assert health("api", environment).returncode != 0
        assert health("worker", environment).returncode != 0, "it has no access to the store"


# -- helpers ----------------------------------------------------------------------------------

ABSENT = """
import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {absent}:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""A `sitecustomize` that hides packages, also in child processes."""

READ_ONLY = """
import errno, os, sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def hook(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, (str, bytes)) or not flags & WRITES:
            return
    elif event in ("os.mkdir", "os.rename", "os.remove", "sqlite3.connect"):
        path = arguments[0]
    else:
        return
    full = os.path.abspath(os.fsdecode(path))
    if not full.startswith(("{allowed}/", "/dev/", "/proc/")):
        raise OSError(errno.EROFS, "Read-only file system", full)


sys.addaudithook(hook)
"""
"""A `sitecustomize` that allows writing in one folder only."""


def stages() -> dict[str, dict[str, str]]:
    """Return the last instruction of each kind, for each stage of the Dockerfile."""
    stages_by_name: dict[str, dict[str, str]] = {}
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    current: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            current = stages_by_name.setdefault(rest.rpartition(" AS ")[2], {})
        elif word:
            current[word] = rest.strip()
    return stages_by_name


def image_environment(target: str) -> dict[str, str]:
    """Return the REMAT_* variables that an image sets."""
    pairs = (part.partition("=") for part in stages()[target]["ENV"].split())
    return {name: value for name, _, value in pairs if name.startswith("REMAT_")}


def interpolated(value: object, variables: dict[str, str] | None = None) -> str:
    """Return a value of compose.yaml with these variables set."""
    return re.sub(
        r"\$\{(\w+)(?::-([^}]*))?\}",
        lambda match: (variables or {}).get(match[1]) or match[2] or "",
        str(value),
    )


def settings_of(service: dict[str, Any], variables: dict[str, str] | None = None) -> Settings:
    """Return the settings of a service of compose.yaml."""
    values = dict(image_environment(service["build"]["target"]))
    values |= {
        name: interpolated(value, variables) for name, value in service["environment"].items()
    }
    return Settings(**{name.removeprefix("REMAT_").lower(): v for name, v in values.items()})


def dockerfile_requirements(file: str) -> set[str]:
    """Return the extras that the Dockerfile passes to `requirements.py` for a file."""
    match = re.search(rf"requirements\.py ([\w,-]+)(?: ([\w,-]+))? > {file}", DOCKERFILE)
    assert match is not None
    extras, without = match[1].split(","), (match[2] or "").split(",")
    script = runpy.run_path(str(DOCKER / "requirements.py"))
    return set(script["requirements"](extras, without))


def not_in_the_image() -> set[str]:
    """Return the packages that are installed here and not in the server's image."""
    ignored: set[tuple[str, str]] = set()
    expected = [Requirement(line) for line in dockerfile_requirements("server.txt")]
    while expected:
        requirement = expected.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in ignored:
                continue
            ignored.add((name, extra))
            for line in distribution(name).requires or ():
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    expected.append(further)
    names = {name for name, _ in ignored} | {"remat"}
    return {
        package
        for package, owners in packages_distributions().items()
        if not names & {canonicalize_name(owner) for owner in owners}
    }


def runs_as_nobody(environment: dict[str, str]) -> dict[str, Any]:
    """Return how to start a process as the image's user, where the tests run as root and that
    user may read the code."""
    if os.geteuid() != 0:
        return {}
    user = {"user": 10001, "group": 10001, "extra_groups": []}
    command = [sys.executable, "-c", "import remat.cli, remat_server.cli"]
    try:
        subprocess.run(command, cwd="/", env=environment, check=True, capture_output=True, **user)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return user


def health(what: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Return the output of the image's health check."""
    command = [sys.executable, DOCKER / "healthcheck.py", what]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
