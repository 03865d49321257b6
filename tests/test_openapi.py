"""The OpenAPI document, and that the service does what it says: schemathesis against a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyStrategyDefinition, Unsatisfiable
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests import server as servers
from tests.server import Server, chain, finished

from remat_server.store import keys
from remat_server.store.database import Database

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BOUNDED: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}
SERVER = {"REMAT_SOLVE_LIMIT_S": "60", "REMAT_REQUESTS_PER_MINUTE": "1000000"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running(tmp_path_factory.mktemp("openapi"), **SERVER) as running:
        yield running


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server that needs a key, and a key."""
    directory = tmp_path_factory.mktemp("closed")
    with servers.running(directory, **SERVER) as running:
        database = Database(f"sqlite:///{directory / 'jobs.sqlite'}")
        with database.write() as connection:
            _, key = keys.add(connection, "test")
        database.close()
        with running.http() as http:
            servers.wait_for(lambda: http.get("/jobs").status_code == 401)
        yield running, key


def described(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


# -- the document ---------------------------------------------------------------------------------


def test_the_document_is_valid(server: Server) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described(server).validate()
    schemas = document["components"]["schemas"]
    referred = set(re.findall(r'"#/([^"]*)"', json.dumps(document)))
    assert referred == {f"components/schemas/{name}" for name in schemas} & referred
    ids = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids))


def test_problems_are_documented(server: Server) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert "400" in answers, (path, method)
            for status, answer in answers.items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)


# -- what the service does ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "has_key",
    [pytest.param(True, marks=pytest.mark.slow), False, None],
    ids=["key", "no key", "open"],
)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_undocumented_answer(
    server: Server, closed: tuple[Server, str], has_key: bool | None, mode: GenerationMode
) -> None:
    headers = {"Authorization": f"Bearer {closed[1]}"} if has_key else {}
    examples = 3 if has_key is False else 7
    for each in described(server if has_key is None else closed[0]).get_all_operations():
        operation = each.ok()
        try:
            cases = operation.as_strategy(generation_mode=mode)

            @settings(max_examples=examples, **BOUNDED)
            @given(case=cases)
            def check(case: Case) -> None:
                case.call_and_validate(headers=headers, checks=CHECKS, timeout=60)

            check()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with /livez


@pytest.mark.parametrize("has_key", [True, False], ids=["key", "open"])
@pytest.mark.slow
def test_jobs_are_what_their_links_say(
    server: Server, closed: tuple[Server, str], has_key: bool
) -> None:
    """Each request follows from the answer before it: jobs are made, watched, read, forgotten."""
    url = closed[0] if has_key else server
    headers = {"Authorization": f"Bearer {closed[1]}"} if has_key else {}
    answers: list[tuple[str, int]] = []
    budgets = ["60%", "min", 200, 10**6, "0%"]

    class Story(described(url).as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"headers": headers, "timeout": 60}

        def before_call(self, case: Case) -> None:
            if case.method == "POST" and len(answers) % 4:  # else what was made up
                budget = budgets[len(answers) % len(budgets)]
                name = "budgets" if case.path == "/sweeps" else "budget"
                case.body = {"graph": chain(4), name: [budget] if name == "budgets" else budget}
                case.media_type = "application/json"

        def validate_response(self, response: Any, case: Case, **options: Any) -> None:
            answers.append((f"{case.method} {case.path}", response.status_code))
            case.validate_response(response, checks=CHECKS)

    # A job's state changes by itself, so the same steps need not lead on to the same: then the
    # search for further stories ends. Each answer was judged when it came.
    with suppress(FlakyStrategyDefinition):
        Story.run(settings=settings(max_examples=8, stateful_step_count=8, **BOUNDED))
    assert len(answers) > 20
    assert {status for _, status in answers} >= {200, 202, 404}


def test_good_requests_are_documented(server: Server) -> None:
    """The answers that no generated document reaches."""
    schema = described(server)
    with server.http() as http:
        id = http.post("/solve", json={"graph": chain(), "budget": "60%"}).json()["id"]
        finished(http, id)

        def told(method: str, path: str, status: int, **parts: Any) -> None:
            case = schema[path][method].Case(**parts)
            assert case.call_and_validate(checks=CHECKS).status_code == status

        job = {"path_parameters": {"id": id}}
        told("GET", "/jobs/{id}", 200, **job)
        for form in ("json", "svg", "html", "chrome"):
            told("GET", "/jobs/{id}/result", 200, **job, query={"format": form})
        told("GET", "/jobs/{id}/result", 406, **job, query={"format": "python"})
        told("GET", "/jobs/{id}/events", 200, **job)
        etag = http.get(f"/jobs/{id}").headers["ETag"]
        told("GET", "/jobs/{id}", 304, **job, headers={"If-None-Match": etag})
        told("GET", "/jobs", 200, query={"limit": 1})
        for method, path in (("GET", "/jobs"), ("GET", "/livez"), ("POST", "/solve")):
            told(method, path, 400, headers={"Host": "elsewhere.example"})
        body = {"body": {"graph": chain(), "budget": "60%"}, "media_type": "application/json"}
        told("POST", "/solve", 200, **body, query={"dry_run": True})
        told("POST", "/solve", 200, **body, headers={"Prefer": "wait=30"})
        sweep = {"body": {"graph": chain(4), "budgets": ["min"]}, "media_type": "application/json"}
        told("POST", "/sweeps", 200, **sweep, headers={"Prefer": "wait=30"})
        told("POST", "/solve", 413, **body | {"body": {"pad": [0] * 4_000_000}})
        told("POST", "/solve", 415, **body, headers={"Content-Encoding": "br"})
        told("DELETE", "/jobs/{id}", 204, **job)
        told("DELETE", "/jobs/{id}", 404, **job)
