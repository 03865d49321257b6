"""The OpenAPI document, and that the service follows it: schemathesis against a server."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyStrategyDefinition, Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.helpers.paths import ROOT
from tests.helpers.service import server as servers
from tests.helpers.service.server import HARD, Server, chain, finished
from tests.helpers.training.models import PLAIN

import remat
from remat.strategies.registry import STRATEGIES

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
_sizes = itertools.count(100)
SETTINGS = {"REMAT_SOLVE_LIMIT_S": "3600", "REMAT_REQUESTS_PER_MINUTE": "1000000"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server that needs a key, and a key."""
    directory = tmp_path_factory.mktemp("closed")
    with servers.running(directory, **SETTINGS) as running:
        key = running.add_key("test")
        with running.http() as http:
            servers.wait_for(lambda: http.get("/jobs").status_code == 401)
        yield running, key


def described(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


# -- the document ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_openapi_document_is_valid(server: Server) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described(server).validate()
    schemas = document["components"]["schemas"]
    referred = set(re.findall(r'"#/([^"]*)"', json.dumps(document)))
    assert referred == {f"components/schemas/{name}" for name in schemas} & referred
    ids = [
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    ]
    assert len(ids) == len(set(ids))


def test_fields_of_requests_are_described(server: Server) -> None:
    schemas = httpx2.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    for name in ("SolveRequest", "SweepRequest", "FitRequest", "Options", "LinkRecord"):
        for field, schema in schemas[name]["properties"].items():
            assert schema.get("description", "").strip(), (name, field)


def test_every_time_limit_has_the_maximum_of_the_service(server: Server) -> None:
    schemas = httpx2.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    limit, null = schemas["FitRequest"]["properties"]["time_limit"]["anyOf"]
    assert (limit["maximum"], null) == (3600, {"type": "null"})
    strategies = schemas["Options"]["properties"]["strategy"]["oneOf"]
    limits = [s["properties"].get("time_limit") for s in strategies]
    assert {limit["maximum"] for limit in limits if limit} == {3600}


def test_problems_are_documented(server: Server) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert "400" in answers, (path, method)
            for status, answer in answers.items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)


REQUESTS: list[tuple[bool, dict[str, Any]]] = [
    *((True, {"budget": budget}) for budget in ("60%", "8GiB", "0.5 GiB", "min", "7.5GB", 1, 1e99)),
    *((False, {"budget": budget}) for budget in ("", "x", "0%", "auto", 0, -1, 0.5, True, None)),
    (True, {"trace": None}),
    (False, {"graph": None}),
    (False, {"graph": None, "trace": None}),
    (False, {"trace": {}}),
    (False, {"other": None}),
    (True, {"options": {}}),
    (True, {"options": {"costs": None}}),
    (False, {"options": {"costs": "measure"}}),
    (False, {"options": {"costs": "roofline:h200"}}),
    (False, {"options": None}),
    *((True, {"options": {"strategy": {"name": name}}}) for name in STRATEGIES),
    *(
        (good, {"options": {"strategy": strategy}})
        for good, strategy in (
            (False, {}),
            (False, {"name": "none"}),
            (False, {"name": "keep_all", "k": 1}),
            (True, {"name": "every_k", "k": None}),
            (False, {"name": "every_k", "k": 0}),
            (True, {"name": "auto", "threads": 1024}),
            (False, {"name": "auto", "threads": 1025}),
            (True, {"name": "auto", "gap": 0, "peak_gap": 0.5}),
            (False, {"name": "auto", "gap": 1}),
            (False, {"name": "auto", "stall": 0}),
            (True, {"name": "auto", "time_limit": 3600}),
            (False, {"name": "auto", "time_limit": 3601}),
            (True, {"name": "exact", "solver": "HiGHS"}),
            (False, {"name": "exact", "solver": "CBC"}),
            (False, {"name": "lp_rounding", "allowances": []}),
            (False, {"name": "lp_rounding", "allowances": [1.0]}),
        )
    ),
]


DOCUMENTS: list[tuple[bool, str, str, Any]] = [
    *((good, "graph", "operations.0.cost_s", x) for good, x in ((True, 0), (True, 1), (True, 0.5))),
    *((False, "graph", "operations.0.cost_s", x) for x in (-1, 1e-101, 1e100, "1", None)),
    *((True, "graph", "values.0.size_bytes", x) for x in (0, 2.0, 2**60)),
    *((False, "graph", "values.0.size_bytes", x) for x in (-1, 2.5, 2**62, True, "2")),
    (True, "graph", "operations.0.workspace_bytes", 64.0),
    (False, "graph", "operations.0.workspace_bytes", 2**62),
    (True, "graph", "operations.1.inputs", [0.0]),
    (False, "graph", "operations.1.inputs", [0, 0]),
    (False, "graph", "operations.1.inputs", [-1]),
    (True, "graph", "operations.1.overwrites", [0]),
    (True, "graph", "boundary", None),
    (True, "graph", "boundary", 4.0),
    (False, "graph", "boundary", -1),
    (False, "graph", "constant_bytes", 2**62),
    *((True, "trace", "format", x) for x in ("remat.trace", ...)),
    *((False, "trace", "format", x) for x in ("", "remat.plan", None)),
    *(
        (good, "trace", "version", x)
        for good, x in ((True, 2), (True, ...), (False, 1), (False, 0))
    ),
    (False, "trace", "storage_bytes.0", 2**62),
    (True, "trace", "storage_bytes.0", 4096.0),
    *((False, "trace", "nodes.0.name", x) for x in ("", "a b", "__a", "1a", "print", "for", "é")),
    *((True, "trace", "nodes.0.name", x) for x in ("_", "_a", "_1", "A" * 200)),
    (False, "trace", "nodes.0.name", "A" * 201),
    *((False, "trace", "nodes.0.target", x) for x in ("aten.mm", "_.a.b", "os.a.b", "aten.a.b.c")),
    (False, "trace", "nodes.0.target", f"aten.mm.{'a' * 193}"),
    *((True, "trace", "nodes.0.target", x) for x in ("prims.a.b", "aten._a.__b")),
    *(
        (True, "trace", "nodes.0.kwargs", {"a": x})
        for x in (None, True, 2**63 - 1, 1e300, "", [[]])
    ),
    (True, "trace", "nodes.0.kwargs", {"a": 10**20}),  # JavaScript writes 1e20 so
    *((True, "trace", "nodes.0.kwargs", {"a": {"float": x}}) for x in ("inf", "-inf", "nan")),
    (True, "trace", "nodes.0.kwargs", {"a": {"complex": [1, {"float": "inf"}]}}),
    *((True, "trace", "nodes.0.kwargs", {"a": {"dtype": x}}) for x in ("float32", "_a:1")),
    *((False, "trace", "nodes.0.kwargs", {"a": {"dtype": x}}) for x in ("", "_", "é", "a" * 41)),
    *((False, "trace", "nodes.0.kwargs", {"a": {"complex": x}}) for x in ([], [1], [True, 1], "1")),
    *((False, "trace", "nodes.0.kwargs", {"a": x}) for x in ({}, {"ref": "for"}, {"float": "1"})),
    *((False, "trace", "nodes.0.kwargs", {x: 1}) for x in ("", "for", "__a", "a-b")),
    (True, "trace", "nodes.0.kwargs", {"print": 1}),
    *((False, "trace", "nodes.0.cost_s", x) for x in (-1, 1e-101, 1e100)),
    (True, "trace", "placeholders.0.tensor.offset", 1.0),
    (False, "trace", "placeholders.0.tensor.offset", 2**63),
    (False, "trace", "placeholders.0.tensor.shape.0", -1),
    (False, "trace", "placeholders.0.tensor.stride.0", 2**63),
    (False, "trace", "placeholders.0.storage", -1),
    (True, "trace", "inputs", {"kind": "value", "children": []}),
    (False, "trace", "inputs", {"kind": "value", "children": [{"kind": "value"}]}),
    (False, "trace", "inputs", {"kind": "leaf", "leaf": -1}),
    (False, "trace", "library_bytes", 2**62),
]
"""Changes of a document: True if it is then accepted, its kind, a path in it, and the value there
(`...` leaves it out)."""


def changed(document: Any, path: str, value: Any) -> Any:
    """Return a copy of a document with another value at a path."""
    copied = part = json.loads(json.dumps(document))
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    for key in parents:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return copied


@pytest.mark.slow
def test_schema_and_service_accept_the_same_documents(server: Server) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/SolveRequest", "components": document["components"]}
    validator = Draft202012Validator(schema)
    documents = {"graph": chain(4), "trace": priced_trace()}
    wrong = []
    with server.http() as http:
        for is_good, kind, path, value in DOCUMENTS:
            request = {kind: changed(documents[kind], path, value), "budget": "90%"}
            answer = http.post("/solve?dry_run=true", json=request)
            valid = validator.is_valid(request)
            if (answer.status_code, valid) != ((200, True) if is_good else (422, False)):
                wrong.append((kind, path, value, answer.status_code, answer.text[:200], valid))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
def test_a_percentage_of_no_memory_is_a_budget(server: Server) -> None:
    """An empty graph, and one without memory, have a peak of 0 bytes: each budget is feasible."""
    empty = {**chain(0), "operations": [], "values": [], "results": [], "boundary": None}
    with server.http() as http:
        for graph in (empty, chain(4, 0)):
            request = {"graph": graph, "budget": "75%"}
            answer = http.post("/solve", json=request, headers={"Prefer": "wait=30"})
            assert answer.json()["plan"]["budget_bytes"] == 0, answer.text
            job = http.post("/sweeps", json={"graph": graph}).json()
            assert finished(http, job["id"])["status"] == "succeeded"


@pytest.mark.slow
def test_schema_and_service_accept_the_same_requests(server: Server) -> None:
    """`oneOf` the graph and the trace; null is equal to leaving it out."""
    document = httpx2.get(f"{server.url}/openapi.json").json()
    components = {"components": document["components"]}
    with server.http() as http:

        def is_agreed(kind: str, where: str, request: dict[str, Any], is_good: bool) -> None:
            answer = http.post(f"{where}?dry_run=true", json=request)
            assert answer.status_code == (200 if is_good else 422), (request, answer.text)
            schema = {"$ref": f"#/components/schemas/{kind}", **components}
            assert Draft202012Validator(schema).is_valid(request) == is_good, request

        for is_good, changes in REQUESTS:
            request = {"graph": chain(4), "budget": "50%", **changes}
            is_agreed("SolveRequest", "/solve", request, is_good)
            budget = request.pop("budget")
            is_agreed("SweepRequest", "/sweeps", {**request, "budgets": [budget]}, is_good)
        for budgets, is_good in ((None, True), ([], False), (["50%"] * 101, False), ("min", False)):
            request = {"graph": chain(4), "budgets": budgets}
            is_agreed("SweepRequest", "/sweeps", request, is_good)
        example = document["paths"]["/solve"]["post"]["requestBody"]["content"]
        request = example["application/json"]["example"]
        assert http.post("/solve", json=request, headers={"Prefer": "wait=30"}).status_code == 200


# -- answers of the service -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "has_key",
    [pytest.param(True, marks=pytest.mark.slow), False, pytest.param(None, marks=pytest.mark.slow)],
    ids=["key", "no key", "open"],
)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_answer_is_undocumented(
    server: Server, closed: tuple[Server, str], has_key: bool | None, mode: GenerationMode
) -> None:
    headers = {"Authorization": f"Bearer {closed[1]}"} if has_key else {}
    examples = 2 if has_key is False else 7
    for api_operation in described(server if has_key is None else closed[0]).get_all_operations():
        operation = api_operation.ok()
        try:
            cases = operation.as_strategy(generation_mode=mode)

            @settings(max_examples=examples, **BOUNDED)
            @hypothesis.given(case=cases)
            def check(case: Case) -> None:
                case.call_and_validate(headers=headers, checks=CHECKS, timeout=60)

            check()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # no request to /livez is wrong


@pytest.mark.parametrize("has_key", [True, False], ids=["key", "open"])
@pytest.mark.slow
def test_links_between_operations_lead_to_the_job(
    server: Server, closed: tuple[Server, str], has_key: bool
) -> None:
    """Each request follows from the answer before it: jobs are created, watched, read, deleted."""
    url = closed[0] if has_key else server
    headers = {"Authorization": f"Bearer {closed[1]}"} if has_key else {}
    answers: list[tuple[str, int]] = []
    budgets = ["60%", "min", 200, 10**6, "0%"]

    class Story(described(url).as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"headers": headers, "timeout": 60}

        def before_call(self, case: Case) -> None:
            if case.method == "POST" and len(answers) % 4:  # otherwise the generated value
                budget = budgets[len(answers) % len(budgets)]
                name = "budgets" if case.path == "/sweeps" else "budget"
                case.body = {"graph": chain(4), name: [budget] if name == "budgets" else budget}
                case.media_type = "application/json"

        def validate_response(self, response: Any, case: Case, **options: Any) -> None:
            answers.append((f"{case.method} {case.path}", response.status_code))
            case.validate_response(response, checks=CHECKS)

    # A job's state changes over time, so equal steps may have different results: then the search
    # for further sequences ends. Each answer was checked when it came.
    with suppress(FlakyStrategyDefinition):
        Story.run(settings=settings(max_examples=8, stateful_step_count=8, **BOUNDED))
    assert len(answers) > 20
    assert {status for _, status in answers} >= {200, 202, 404}


@pytest.mark.slow
def test_answers_to_valid_requests_are_documented(server: Server) -> None:
    """These are the answers that no generated document reaches."""
    schema = described(server)
    with server.http() as http:
        id = http.post("/solve", json={"graph": chain(), "budget": "60%"}).json()["id"]
        finished(http, id)

        def request(method: str, path: str, status: int, **parts: Any) -> None:
            case = schema[path][method].Case(**parts)
            assert case.call_and_validate(checks=CHECKS).status_code == status

        job = {"path_parameters": {"id": id}}
        request("GET", "/jobs/{id}", 200, **job)
        for form in ("json", "svg", "html", "chrome"):
            request("GET", "/jobs/{id}/result", 200, **job, query={"format": form})
        request("GET", "/jobs/{id}/result", 404, **job, query={"format": "python"})
        request("GET", "/jobs/{id}/result", 406, **job, headers={"Accept": "text/x-python"})
        request("GET", "/jobs/{id}/events", 200, **job)
        etag = http.get(f"/jobs/{id}").headers["ETag"]
        request("GET", "/jobs/{id}", 304, **job, headers={"If-None-Match": etag})
        request("GET", "/jobs", 200, query={"limit": 1})
        for method, path in (("GET", "/jobs"), ("GET", "/livez"), ("POST", "/solve")):
            request(method, path, 400, headers={"Host": "elsewhere.example"})
        body = {"body": {"graph": chain(), "budget": "60%"}, "media_type": "application/json"}
        request("POST", "/solve", 200, **body, query={"dry_run": True})
        request("POST", "/solve", 200, **body, headers={"Prefer": "wait=30"})
        sweep = {"body": {"graph": chain(4), "budgets": ["min"]}, "media_type": "application/json"}
        request("POST", "/sweeps", 200, **sweep, headers={"Prefer": "wait=30"})
        key = {"headers": {"Idempotency-Key": "one"}}
        request("POST", "/solve", 202, **body, **key)
        request("POST", "/solve", 409, **sweep | key | {"body": body["body"] | {"budget": "min"}})
        request("POST", "/solve", 413, **body | {"body": {"pad": [0] * 4_000_000}})
        request("POST", "/solve", 415, **body, headers={"Content-Encoding": "br"})
        request("DELETE", "/jobs/{id}", 204, **job)
        request("DELETE", "/jobs/{id}", 404, **job)


# -- schemathesis ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_schemathesis_finds_no_failure(server: Server, tmp_path: Path, seed: int) -> None:
    """All its checks, against a server that holds jobs of every end."""
    with server.http() as http:
        documents = hook_documents(http)
        options = (f"--seed={seed}", f"--max-examples={5 if seed else 200}")
        answers = run_schemathesis(server.url, documents, tmp_path, *options)
        check_failures(http)
    forms = set(documents["forms"])
    offered = {"trace": forms, "graph": forms - {"python", "program"}, "sweep": {"json", "svg"}}
    for end, id in documents["jobs"].items():
        for form in forms:
            status = 200 if form in offered.get(end, forms) else 404
            if end in ("failed", "cancelled"):
                status = 409
            assert ("GET", f"/jobs/{id}/result?format={form}", status) in answers, (end, form)
    for status, count in ((202, 1), (204, 6)):
        ended = {
            path for method, path, documents in answers if (method, documents) == ("DELETE", status)
        }
        assert len(ended & {f"/jobs/{id}" for id in documents["spare"]}) >= count


@pytest.mark.slow
def test_schemathesis_finds_no_failure_with_keys(
    closed: tuple[Server, str], tmp_path: Path
) -> None:
    """No request is answered without the right key."""
    server, key = closed
    authorization = f"Authorization: Bearer {key}"
    with server.http(headers=[authorization.split(": ")]) as http:
        documents = hook_documents(http) | {"has_key": True}
        options = ("--seed=1", "--max-examples=25", "--header", authorization)
        run_schemathesis(server.url, documents, tmp_path, *options)
        check_failures(http)


def check_failures(http: httpx2.Client) -> None:
    """Check that no job failed because of a bug: a result says only that there is none."""
    page = http.get("/jobs?status=failed&limit=200").json()
    assert not [
        job["problem"]
        for job in page["jobs"]
        if job["problem"]["type"].rpartition(":")[2] in ("crashed", "internal", "worker-lost")
    ]


def priced_trace() -> dict[str, Any]:
    case = PLAIN["mlp"]()
    priced = remat.measure(remat.trace(case.model, case.args, case.kwargs), remat.Roofline("cpu"))
    return json.loads(priced.to_json())


def hook_documents(http: httpx2.Client) -> dict[str, Any]:
    """Return the data of `openapi_hooks`: jobs that ended in every way, and some to delete."""
    trace = priced_trace()
    few = {"name": "checkmate", "max_operations": 1}

    def made(where: str = "/solve", **body: Any) -> str:
        answer = http.post(where, json={"graph": chain(), **body})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def long() -> str:
        # A graph that was solved before has its result at once.
        graph = chain(200, size=next(_sizes))
        id = made(graph=graph, budget="22%", options={"strategy": HARD | {"time_limit": 3000.0}})
        servers.wait_for(lambda: http.get(f"/jobs/{id}").json()["status"] == "running")
        return id

    def ended() -> dict[str, str]:
        jobs = {
            "trace": made(graph=None, trace=trace, budget="90%"),
            "graph": made(budget="70%"),
            "sweep": made("/sweeps", budgets=["min", "70%"]),
            "infeasible": made(budget=200),
            "failed": made(budget="60%", options={"strategy": few}),
            "cancelled": long(),
        }
        assert http.delete(f"/jobs/{jobs['cancelled']}").status_code == 202
        solved = dict.fromkeys(("trace", "graph", "sweep"), "succeeded")
        for end, id in jobs.items():
            assert finished(http, id)["status"] == solved.get(end, end)
        return jobs

    parameters = http.get("/openapi.json").json()["paths"]["/jobs/{id}/result"]["get"]["parameters"]
    return {
        "jobs": ended(),
        "spare": [*ended().values(), long()],
        "forms": parameters[1]["schema"]["anyOf"][0]["enum"],
        "has_key": False,
    }


def run_schemathesis(
    url: str, documents: dict[str, Any], directory: Path, *options: str
) -> set[tuple[str, str, int]]:
    """Return the answers (method, path with query, status) of a run that must find no failure."""
    config, archive = ROOT / "schemathesis.toml", directory / "requests.har"
    (directory / "given.json").write_text(json.dumps(documents))
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(config)]
    command += ["run", f"{url}/openapi.json", "--checks=all", f"--report-har-path={archive}"]
    ended = subprocess.run(
        [*command, *options],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPENAPI_GIVEN": str(directory / "given.json"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    answers = set()
    for entry in json.loads(archive.read_text())["log"]["entries"]:
        request, answer = entry["request"], entry["response"]
        answers.add((request["method"], request["url"].removeprefix(url), answer["status"]))
    return answers
