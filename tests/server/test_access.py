"""Access control and rate limits over HTTP, on real servers."""

from __future__ import annotations

import base64
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server, chain, post, wait_for

import remat
from remat.documents.plan import GraphRecord
from remat.service.wire import SolveRequest
from remat_server.store import leases
from remat_server.store.database import Database

NOBODY = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Closed:
    """A server that needs a key, the keys of two users, and one that was revoked."""

    server: Server
    ann: str
    bob: str
    revoked: str


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    settings = {"REMAT_REQUESTS_PER_MINUTE": "1000000", "REMAT_QUEUED_PER_KEY": "1"}
    directory = tmp_path_factory.mktemp("closed")
    with servers.running(directory, "--workers", "0", **settings) as server, server.http() as http:
        assert http.get("/jobs").status_code == 200, "there are no keys yet"
        keys = [server.add_key("ann"), server.add_key("bob"), remat_keys(server, "add", "eve")]
        wait_for(lambda: http.get("/jobs").status_code == 401)
        eve = {"Authorization": f"Bearer {keys[-1]}"}
        assert http.get("/jobs", headers=eve).status_code == 200
        remat_keys(server, "revoke", keys[-1].split("_")[1])
        assert http.get("/jobs", headers=eve).status_code == 401, "at once"
        yield Closed(server, *keys)


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer x",
        "Bearer remat_",
        "Bearer remat_{id}",
        "Bearer remat_{id}_",
        "Bearer remat_{id}_{secret}x",
        "Bearer {secret}",
        "Bearer {ann}, Bearer {ann}",
        "Bearer {ann} {ann}",
        "Bearer{ann}",
        "Bearer:{ann}",
        "{ann}",
        "Bearer {revoked}",
        "bearer {revoked}",
        "Basic {ann}",
        "Basic {basic}",
        "Token {ann}",
        "Digest {ann}",
        "Negotiate {basic}",
        "Bearer remat_{other}_{secret}",
    ],
)
def test_a_wrong_key_is_refused(closed: Closed, header: str) -> None:
    _, id, secret = closed.ann.split("_", 2)
    sent = header.format(
        ann=closed.ann,
        id=id,
        secret=secret,
        other=closed.bob.split("_")[1],
        revoked=closed.revoked,
        basic=base64.b64encode(f"ann:{closed.ann}".encode()).decode(),
    )
    with closed.server.http() as http:
        answer = http.get("/jobs", headers={"Authorization": sent})
    refused(answer, has_key=sent.lower().startswith("bearer "))
    assert secret not in answer.text
    assert secret not in closed.server.log.read_text()


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer   {}"])
def test_a_right_key_is_accepted(closed: Closed, header: str) -> None:
    """The name of the scheme is case-insensitive, as in HTTP."""
    with closed.server.http() as http:
        answer = http.get("/jobs", headers={"Authorization": header.format(closed.ann)})
        assert answer.status_code == 200
        refused(http.get("/jobs"), has_key=False)


def test_every_route_needs_a_key_except_the_documented_ones(closed: Closed) -> None:
    with closed.server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        routes = [(m, p, o) for p, methods in paths.items() for m, o in methods.items()]
        assert len(routes) >= 11
        for method, path, operation in routes:
            for headers in ({}, {"Authorization": f"Bearer {closed.revoked}"}):
                sent = {"json": {"graph": chain(4), "budget": "min"}} if method == "post" else {}
                answer = http.request(method, path.format(id=NOBODY), headers=headers, **sent)
                if operation.get("security") == []:
                    assert answer.status_code == 200, path
                else:
                    refused(answer, has_key=bool(headers))
        opened = {p for _, p, o in routes if o.get("security") == []}
        assert opened == {"/livez", "/readyz"}
        for path in ("/", "/docs", "/openapi.json", "/static/app.js"):
            assert http.get(path).status_code == 200
    for key in (closed.ann, closed.bob):
        with closed.server.http(headers=bearer(key)) as http:
            assert http.get("/jobs").json()["jobs"] == [], "no job was made"


def test_users_see_only_their_own_jobs(closed: Closed) -> None:
    with (
        closed.server.http(headers=bearer(closed.ann)) as ann,
        closed.server.http(headers=bearer(closed.bob)) as bob,
    ):
        body, once = {"graph": chain(4), "budget": "70%"}, {"Idempotency-Key": "once"}
        id = ann.post("/solve", json=body, headers=once).json()["id"]
        assert ann.post("/solve", json=body, headers=once).json()["id"] == id
        for method, path in (
            ("GET", "/jobs/{}"),
            ("GET", "/sweeps/{}"),
            ("GET", "/jobs/{}/events"),
            ("GET", "/jobs/{}/result"),
            ("DELETE", "/jobs/{}"),
        ):
            bodies = []
            for other_id in (id, NOBODY):
                with bob.stream(method, path.format(other_id)) as answer:
                    assert answer.status_code == 404, path
                    bodies.append(answer.read().decode().replace(other_id, "..."))
            assert bodies[0] == bodies[1], "it is not revealed whether the job exists"
        assert bob.get("/jobs").json()["jobs"] == []
        job_id = bob.post("/solve", json=body, headers=once).json()["id"]
        assert job_id != id
        assert [job["id"] for job in bob.get("/jobs").json()["jobs"]] == [job_id]
        assert [job["id"] for job in ann.get("/jobs").json()["jobs"]] == [id]
        for user, job in ((ann, id), (bob, job_id)):
            assert user.delete(f"/jobs/{job}").status_code == 202
            assert user.delete(f"/jobs/{job}").status_code == 204


# -- limits ---------------------------------------------------------------------------------------


def test_the_number_of_queued_jobs_of_a_key_is_limited(closed: Closed) -> None:
    with (
        closed.server.http(headers=bearer(closed.ann)) as ann,
        closed.server.http(headers=bearer(closed.bob)) as bob,
    ):
        first = post(ann, budget="60%", graph=chain(5)).json()["id"]
        full = post(ann, budget="70%", graph=chain(5))
        assert full.status_code == 429
        assert full.headers["content-type"] == "application/problem+json"
        assert full.json()["type"] == "urn:remat:problem:queue-full"
        assert 0 < int(full.headers["Retry-After"]) <= 60
        sweep = ann.post("/sweeps", json={"graph": chain(5), "budgets": ["min"]})
        assert sweep.json()["type"] == "urn:remat:problem:queue-full"
        assert len(ann.get("/jobs").json()["jobs"]) == 1
        assert ann.post(
            "/solve?dry_run=true", json={"graph": chain(5), "budget": "70%"}
        ).status_code == 200  # fmt: skip
        other = post(bob, budget="70%", graph=chain(5))
        assert other.status_code == 202, "each key has its own"
        solve_as_a_worker_would(closed.server, other.json()["id"])
        cached = post(ann, budget="70%", graph=chain(5))
        assert (cached.status_code, cached.json()["status"]) == (202, "succeeded"), (
            "a job answered from the store needs no place"
        )
        assert ann.delete(f"/jobs/{first}").status_code == 202
        refused = post(ann, budget="80%", graph=chain(5))
        assert refused.status_code == 202, "there is room in the queue"
        for user in (ann, bob):
            for job in user.get("/jobs").json()["jobs"]:
                while user.delete(f"/jobs/{job['id']}").status_code != 204:
                    pass


@pytest.mark.slow
def test_the_client_waits_for_a_place_in_the_queue(closed: Closed) -> None:
    graph = GraphRecord.model_validate(chain(6), strict=False)
    with closed.server.client(closed.ann) as client:
        first = client.submit(SolveRequest(graph=graph, budget="60%")).id
        threading.Timer(0.5, client.cancel, [first]).start()
        second = client.submit(SolveRequest(graph=graph, budget="70%")).id
        assert client.job(first).status == "cancelled"
        assert client.job(second).status == "queued"
        client.cancel(second)
    with (
        closed.server.client(closed.revoked) as client,
        pytest.raises(remat.ServiceError, match="is unknown or was revoked"),
    ):
        client.job(first)


@pytest.mark.slow
def test_the_number_of_requests_a_minute_is_limited(tmp_path: Path) -> None:
    """For each key, or for each address without a right key. The service believes a proxy on its
    own machine about addresses, which gives this test several of them."""
    settings = {"REMAT_REQUESTS_PER_MINUTE": "3"}
    with servers.running(tmp_path, "--workers", "0", **settings) as server, server.http() as http:

        def until_refused(address: str, *api_key: str, status: int = 200) -> None:
            """Send requests with one key after the other until one is refused; do it three
            times, or more where a minute ends."""
            headers = [{"X-Forwarded-For": address} | key for key in map(bearer, api_key)]
            headers = headers or [{"X-Forwarded-For": address}]
            answers = [http.get("/jobs", headers=headers[n % len(headers)]) for n in range(7)]
            taken = next((n for n, answer in enumerate(answers) if answer.status_code == 429), 7)
            assert 3 <= taken <= 6
            assert {answer.status_code for answer in answers[:taken]} == {status}
            refusal = answers[taken]
            assert refusal.headers["content-type"] == "application/problem+json"
            assert refusal.json()["type"] == "urn:remat:problem:too-many"
            assert "3 requests in a minute" in refusal.json()["detail"]
            assert 0 < int(refusal.headers["Retry-After"]) <= 60
            body = {"graph": chain(4), "budget": "min"}
            posts = (
                http.post("/solve", json=body, headers=headers[n % len(headers)]) for n in range(5)
            )
            assert any(answer.status_code == 429 for answer in posts)
            assert http.get("/livez", headers=headers[0]).status_code == 200

        for address in ("192.0.2.1", "192.0.2.2"):
            until_refused(address)
        ann, bob = server.add_key("ann"), server.add_key("bob")
        fresh = (f"198.51.100.{n}" for n in range(1, 200))
        wait_for(
            lambda: http.get("/jobs", headers={"X-Forwarded-For": next(fresh)}).status_code == 401
        )
        until_refused("192.0.2.3", "remat_x_y", "remat_z_y", ann + "x", status=401)
        until_refused("192.0.2.3", ann)  # wrong keys from the same address do not count for it
        until_refused("192.0.2.4", bob)
        until_refused("192.0.2.4", "remat_x_y", status=401)


# -- helpers --------------------------------------------------------------------------------------


def refused(answer: httpx2.Response, *, has_key: bool) -> None:
    assert answer.status_code == 401, answer.request.url
    assert answer.headers["content-type"] == "application/problem+json"
    challenge = 'Bearer error="invalid_token"' if has_key else "Bearer"
    assert answer.headers["WWW-Authenticate"] == challenge
    problem = answer.json()
    assert ("revoked" if has_key else "this service needs an API key") in problem["detail"]
    assert problem["type"] == "urn:remat:problem:unauthorized"
    assert problem["status"] == 401
    assert "remat keys add" in problem["detail"]


def solve_as_a_worker_would(server: Server, id: str) -> None:
    database = Database(f"sqlite:///{server.environment['REMAT_DATA_DIR']}/jobs.sqlite")
    with database.write() as connection:
        while (job := leases.claim(connection, "w", (), 60.0)) is not None and job.id != id:
            pass
        body = gzip.compress(b"{}")
        assert leases.finish(connection, "w", id, "succeeded", body=body, seconds=1.0)
    database.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def remat_keys(server: Server, *arguments: str) -> str:
    command = [sys.executable, "-m", "remat.cli", "keys", *arguments]
    completed = subprocess.run(command, env=server.environment, capture_output=True, check=True)
    return completed.stdout.decode().strip()
