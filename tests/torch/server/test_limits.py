"""The limits of the service's settings, from both sides, on real servers."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import update
from tests.helpers.process_limit import PROCESS_LIMIT_S
from tests.helpers.service import server as servers
from tests.helpers.service.server import (
    HARD,
    Server,
    chain,
    finished,
    post,
    solving_processes,
    wait_for,
)
from tests.helpers.training.models import PLAIN

import remat
from remat.strategies import KeepAll
from remat.strategies.base import with_limits
from remat_server.http.auth import ANONYMOUS
from remat_server.settings import Settings
from remat_server.store import jobs, tables
from remat_server.store.database import Database, now
from remat_server.store.jobs import NewJob

OPERATIONS, VALUES, BODY_BYTES = 69, 67, 64_000
SETTINGS = {
    "REMAT_ALLOWED_HOSTS": "Remat.Example.org, other.example.org",
    "REMAT_NAMESPACES": "my,your",
    "REMAT_SOLVERS": "HiGHS,CBC",
    "REMAT_SOLVE_LIMIT_S": "6",
    "REMAT_OPERATIONS": str(OPERATIONS),
    "REMAT_VALUES": str(VALUES),
    "REMAT_BODY_BYTES": "64kB",
    "REMAT_WAIT_S": "0.3",
    "REMAT_CONCURRENT_SOLVES": "1",
}


def test_size_settings_are_in_bytes() -> None:
    for text, size_bytes in (("8GiB", 8 << 30), ("7.5 GB", 7_500_000_000), ("123", 123), (9, 9)):
        assert Settings.model_validate({"body_bytes": text}).body_bytes == size_bytes
    for wrong in ("60%", "min", "auto", "0", "8 gigs", -1):
        with pytest.raises(ValueError, match="body_bytes"):
            Settings.model_validate({"body_bytes": wrong})


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    """A trace of as many operations as the service accepts."""
    case = PLAIN["mlp"]()
    traced = remat.measure(remat.trace(case.model, case.args, case.kwargs), remat.Roofline("cpu"))
    assert len(traced.nodes) == OPERATIONS
    return json.loads(traced.to_json())


def dry(http: httpx2.Client, says: str = "", status: int = 422, **changes: Any) -> None:
    """Check that a dry run is accepted, or refused with a problem that contains the words."""
    options = {"strategy": {"name": "auto", "time_limit": 6.0}}
    body = {"graph": chain(4), "budget": "60%", "options": options, **changes}
    answer = http.post("/solve?dry_run=true", json=body)
    assert answer.status_code == (status if says else 200), answer.text
    assert says in answer.text


# -- limits of requests ---------------------------------------------------------------------------


def test_only_allowed_hosts_are_answered(http: httpx2.Client) -> None:
    good = ("remat.example.org", "REMAT.EXAMPLE.ORG:443", "other.example.org:8000", "[::1]")
    for host in (*good, "localhost", "127.0.0.1:80", "[::1]:8000"):
        assert http.get("/jobs", headers={"Host": host}).status_code == 200, host
    for host in ("example.org", "remat.example.org.evil.example", "x.other.example.org", "[::2]"):
        answer = http.get("/jobs", headers={"Host": host})
        assert answer.status_code == 400, host
        assert "REMAT_ALLOWED_HOSTS" in answer.json()["detail"]


def test_the_size_of_graphs_is_limited(http: httpx2.Client, trace: dict[str, Any]) -> None:
    dry(http, graph=chain(33))  # 67 of both
    dry(http, "69 values; this service accepts up to 67", 413, graph=chain(34))
    dry(http, "71 operations; this service accepts up to 69", 413, graph=chain(35))
    dry(http, graph=None, trace=trace)
    more = {**trace, "nodes": [*trace["nodes"], trace["nodes"][-1]]}
    dry(http, "70 operations; this service accepts up to 69", 413, graph=None, trace=more)


def test_the_size_of_bodies_is_limited(http: httpx2.Client) -> None:
    options = {"strategy": {"name": "keep_all"}}
    text = json.dumps({"graph": chain(4), "budget": "60%", "options": options})
    sent = {"headers": {"Content-Type": "application/json"}}
    for size, status in ((BODY_BYTES, 200), (BODY_BYTES + 1, 413)):
        answer = http.post("/solve?dry_run=true", content=text.ljust(size), **sent)
        assert answer.status_code == status, answer.text
    assert "over 64,000 bytes" in answer.json()["detail"]


def test_only_allowed_operator_namespaces_are_accepted(
    http: httpx2.Client, trace: dict[str, Any]
) -> None:
    for target, says in (
        ("my.mul.Tensor", ""),
        ("your.mul.Tensor", ""),
        ("their.mul.Tensor", "only operators of aten, my, prims, remat, your"),
    ):
        text = json.dumps(trace)
        assert "aten.mul.Tensor" in text
        changed = json.loads(text.replace("aten.mul.Tensor", target))
        dry(http, says, graph=None, trace=changed)


def test_solvers_and_time_limits_are_limited(http: httpx2.Client) -> None:
    for name in ("auto", "exact"):
        for solver in ("HiGHS", "highs", "CBC", "cbc"):
            dry(http, options={"strategy": {"name": name, "time_limit": 6, "solver": solver}})
        strategy = {"name": name, "time_limit": 6, "solver": "Gurobi"}
        dry(http, "'Gurobi', only HiGHS, CBC", options={"strategy": strategy})
        strategy = {"name": name, "time_limit": 6.01}
        dry(http, "accepts up to 6 s", options={"strategy": strategy})
    dry(http, options={})  # the default is more, and the solve ends at the service's limit
    dry(http, options={"strategy": {"name": "keep_all"}})
    described = http.get("/openapi.json").json()["components"]["schemas"]["Options"]
    auto = described["properties"]["strategy"]["oneOf"][0]["properties"]
    assert (auto["time_limit"]["maximum"], auto["solver"]["enum"]) == (6, ["CBC", "HiGHS"])


def test_dry_runs_price_traces_by_a_data_sheet(http: httpx2.Client, trace: dict[str, Any]) -> None:
    bare = json.loads(json.dumps(trace))
    for node in bare["nodes"]:
        node |= {"cost_s": None, "workspace_bytes": None, "cost_source": ""}
    strategy = {"name": "keep_all"}
    for document, costs, costs_from in (
        (trace, None, "roofline cpu"),
        (trace, "roofline:h200", "roofline h200"),
        (bare, "roofline:h200", "roofline h200"),
    ):
        options = {"strategy": strategy, "costs": costs}
        body = {"trace": document, "budget": "100%", "options": options}
        response = http.post("/solve?dry_run=true", json=body).json()
        assert response["costs"] == costs_from
        assert response["operations"] > 30
        assert response["baseline_peak_bytes"] > response["constant_bytes"] > 0


# -- limits of solves -----------------------------------------------------------------------------


@pytest.mark.slow
def test_waits_and_concurrent_solves_are_limited(server: Server, http: httpx2.Client) -> None:
    options = {"strategy": {**HARD, "time_limit": 6.0}}
    body = {"graph": chain(30), "budget": "22%", "options": options}
    response = http.post("/solve", json=body, headers={"Prefer": "respond-async, wait=30"})
    assert response.status_code == 202, "the result is not ready in time"
    assert response.headers["Preference-Applied"] == "wait=0.3"
    assert response.headers["Location"] == f"/jobs/{response.json()['id']}"
    assert response.json()["status"] in ("queued", "running")
    other = post(http, graph=chain(31), budget="22%", options=options).json()["id"]
    data = server.environment["REMAT_DATA_DIR"]
    solving = wait_for(lambda: solving_processes(data))
    for _ in range(10):
        time.sleep(0.05)
        assert len(solving) == 1
        assert http.get(f"/jobs/{other}").json()["status"] == "queued"
        solving |= solving_processes(data)
    for id in (other, response.json()["id"]):
        assert http.delete(f"/jobs/{id}").status_code == 202


@pytest.mark.parametrize(("requested", "granted"), [(64, 2), (2, 2), (1, 1)])
def test_the_threads_and_the_time_of_a_solve_are_limited(requested: int, granted: int) -> None:
    requests, limited = (
        remat.Auto(threads=number, time_limit=10.0 * number) for number in (requested, granted)
    )
    assert with_limits(requests, threads=2, time_limit=20.0) == limited
    assert with_limits(KeepAll(), threads=2, time_limit=20.0) == KeepAll()


@pytest.mark.parametrize("name", ["auto", "exact", "checkmate", "lp_rounding"])
def test_a_request_without_a_time_limit_has_that_of_the_service(
    http: httpx2.Client, name: str
) -> None:
    """The default of these strategies is longer."""
    dry(http, options={"strategy": {"name": name}})
    dry(http, "accepts up to 6 s", options={"strategy": {"name": name, "time_limit": 6.1}})
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for strategy in schemas["Options"]["properties"]["strategy"]["oneOf"]:
        if strategy["properties"]["name"]["const"] == name:
            time_limit = strategy["properties"]["time_limit"]
            assert (time_limit["default"], time_limit["maximum"]) == (6, 6)


def test_the_schema_has_the_namespaces_of_the_service(
    http: httpx2.Client, trace: dict[str, Any]
) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    node = next(node for node in trace["nodes"] if not node["view"])
    for namespace, is_offered in (("aten", True), ("my", True), ("your", True), ("other", False)):
        target = f"{namespace}.sin.default"
        assert bool(re.search(schemas["Target"]["pattern"], target)) == is_offered
        nodes = [
            {**other, "target": target} if other is node else other for other in trace["nodes"]
        ]
        changed = {**trace, "nodes": nodes}
        dry(http, "" if is_offered else "accepts only operators", graph=None, trace=changed)


def test_a_sweep_is_at_the_address_of_its_answer(http: httpx2.Client) -> None:
    options = {"strategy": {"name": "keep_all"}}
    body = {"graph": chain(4), "budgets": ["100%"], "options": options}
    response = http.post("/sweeps", json=body)
    assert response.status_code == 202
    id = response.json()["id"]
    assert response.headers["Location"] == f"/sweeps/{id}"
    finished(http, id)
    assert http.get(response.headers["Location"]).json()["kind"] == "sweep"


@pytest.mark.slow
def test_a_starting_worker_deletes_old_jobs_and_fails_lost_ones(tmp_path: Path) -> None:
    """It does so before it claims a job."""
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    database.migrate()
    body = gzip.compress(json.dumps({"graph": chain(4), "budget": "min"}).encode())
    with database.write() as connection:
        ids = [
            jobs.submit(connection, NewJob(ANONYMOUS, "solve", name, body))
            for name in ("old", "new", "lost", "lost once")
        ]
        for id, ago_s in zip(ids[:2], (7200, 60), strict=True):
            jobs.cancel_or_delete(connection, ANONYMOUS, id)
            ended = update(tables.jobs).where(tables.jobs.c.id == id)
            connection.execute(ended.values(finished_at=now() - ago_s))
        for id, times in zip(ids[2:], (2, 1), strict=True):
            lost = update(tables.jobs).where(tables.jobs.c.id == id)
            connection.execute(lost.values(status="running", lease_until=0.0, attempts=times))
    database.close()
    limits = {"REMAT_RETENTION_S": "3600", "REMAT_ATTEMPTS": "2"}
    with servers.running(tmp_path, **limits) as server, server.http() as http:
        assert finished(http, ids[3])["status"] == "succeeded"
        assert http.get(f"/jobs/{ids[0]}").status_code == 404
        assert "deleted after its retention time" in http.get(f"/jobs/{ids[0]}").text
        assert http.get(f"/jobs/{ids[1]}").json()["status"] == "cancelled"
        lost = http.get(f"/jobs/{ids[2]}").json()
        assert lost["status"] == "failed"
        assert lost["problem"]["type"] == "urn:remat:problem:worker-lost"
        assert "lost 2 times" in lost["problem"]["detail"]


# -- hosts and keys -------------------------------------------------------------------------------


@pytest.mark.slow
def test_listening_for_other_machines_needs_keys_or_a_permission(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REMAT_")}
    environment |= {"REMAT_DATA_DIR": str(tmp_path), "REMAT_PORT": str(servers.free_port())}
    command = [sys.executable, "-m", "remat.cli", "serve", "--host", "0.0.0.0"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S
    )
    assert ended.returncode != 0
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("remat: 0.0.0.0 can be reached from other machines")
    assert "remat keys add" in last
    serve = ["--host", "0.0.0.0", "--workers", "0"]
    with (
        servers.running(tmp_path, *serve, REMAT_ALLOW_ANONYMOUS="true") as server,
        server.http() as http,
    ):
        for host in ("localhost", "gpu7:8000"):
            assert http.get("/jobs", headers={"Host": host}).status_code == 200
        refused = http.get("/jobs", headers={"Host": "gpu7.example.org:8000"})
        assert refused.status_code == 400, "a page of that name could let it point here"
        assert "REMAT_ALLOWED_HOSTS" in refused.json()["detail"]
        key = server.add_key("ann")
    with servers.running(tmp_path, *serve) as server, server.http() as http:
        assert http.get("/jobs", headers={"Host": "gpu7.example.org"}).status_code == 401
        assert http.get("/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200
