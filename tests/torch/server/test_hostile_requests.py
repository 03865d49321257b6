"""Hostile requests: each is answered by a problem document that says what is wrong, costs the
server no more than a real one, and the next valid request works."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import pickle
import random
import select
import socket
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server, chain, finished, wait_for
from tests.helpers.training.models import PLAIN

import remat

FUZZ = settings(
    max_examples=min(16, int(os.environ.get("REMAT_EXAMPLES", "10"))),
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
JSON = {"Content-Type": "application/json"}
ZIPPED = {**JSON, "Content-Encoding": "gzip"}
MIB = 1 << 20
GROWTH_BYTES = 300 * MIB
BUGS = ("crashed", "internal", "worker-lost", "timeout")
QUICK = {"strategy": {"name": "auto", "time_limit": 1.0, "gap": 0.05}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {
        "REMAT_REQUESTS_PER_MINUTE": "1000000",
        "REMAT_SOLVE_MEMORY_BYTES": "2GiB",
        "REMAT_SOLVE_LIMIT_S": "10",
    }
    with servers.running(tmp_path_factory.mktemp("hostile"), **limits) as running:
        with running.http() as http:
            is_good(http)
        yield running
        with running.http() as http:
            is_good(http, 10**7)


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    """A client; after the test, the state of the server is checked."""
    before = resident_bytes(server)
    with server.http() as client:
        yield client
    assert server.process.poll() is None
    assert resident_bytes(server) < before + GROWTH_BYTES
    with server.http() as client:
        is_good(client)
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    torch.manual_seed(0)
    case = PLAIN["mlp"]()
    traced = remat.trace(case.model, case.args, case.kwargs)
    return json.loads(remat.measure(traced, remat.Roofline("cpu")).to_json())


def resident_bytes(server: Server) -> int:
    """Return the peak of the server's resident memory since the last call."""
    process = Path(f"/proc/{server.process.pid}")
    lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    (process / "clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) * 1024


def is_good(http: httpx2.Client, budget: int = 10**6) -> None:
    """Check that a valid request works; with another budget it is solved rather than read from
    the store."""
    request = {"graph": chain(4), "budget": budget, "options": QUICK}
    job = http.post("/solve", json=request)
    assert job.status_code == 202, job.text
    assert finished(http, job.json()["id"])["status"] == "succeeded"


def refused(answer: httpx2.Response, *statuses: int) -> str:
    """Return the reason in a problem document."""
    assert answer.status_code in (statuses or range(400, 500)), (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["type"].startswith("urn:remat:problem:")
    assert 10 < len(problem["detail"]) < 2000
    return problem["detail"]


def refused_or_ended(http: httpx2.Client, body: bytes, where: str = "/solve") -> str:
    """Return whether a request was refused, or accepted and then brought to an end."""
    dry = http.post(f"{where}?dry_run=true", content=body, headers=JSON)
    answer = http.post(where, content=body, headers={**JSON, "Prefer": "wait=60"})
    if answer.status_code >= 400:
        refused(answer)
        refused(dry)
        return "refused"
    if dry.status_code != 200:
        refused(dry)
    assert answer.status_code == 200, answer.text
    job = http.get(answer.headers["Location"]).json()
    assert job["status"] in ("succeeded", "infeasible", "failed")
    if job["problem"] is not None:
        assert job["problem"]["type"].rpartition(":")[2] not in BUGS, job
        assert 10 < len(job["problem"]["detail"]) < 2000
    if job["status"] == "succeeded":
        for form in ("svg", "html", "chrome", "python"):
            shown = http.get(f"/jobs/{job['id']}/result?format={form}")
            assert shown.status_code == 200 or refused(shown, 404)
    return job["status"]


def request_with(**changes: Any) -> bytes:
    """Return a valid request with a bare graph, with a change."""
    return json.dumps({"graph": chain(4), "budget": "70%", "options": QUICK, **changes}).encode()


# -- bodies that are no documents -----------------------------------------------------------------


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zip_file:
        zip_file.writestr("data.pkl", b"x")
    return file.getvalue()


GOOD = request_with()
NO_DOCUMENTS: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"", JSON, 400, "empty"),
    (b"\0", JSON, 422, "no JSON"),
    (b"null", JSON, 422, "object"),
    (b"[]", JSON, 422, "object"),
    (b"\xff\xfe\x00\x01", JSON, 422, "no JSON"),
    (GOOD.decode().encode("utf-16"), JSON, 422, "request"),
    (b"\xef\xbb\xbf" + GOOD, JSON, 422, "request"),
    (GOOD[:-1], JSON, 422, "no JSON"),
    (GOOD + b"x", JSON, 422, "no JSON"),
    (pickle.dumps({"graph": 1}), JSON, 415, "a pickle"),
    (pickle.dumps({"graph": 1}, protocol=0), JSON, 422, "no JSON"),
    (pickle.dumps({"graph": 1}), {"Content-Type": "application/octet-stream"}, 415, "octet"),
    (archive(), JSON, 415, "zip archive"),
    (archive(), {"Content-Type": "application/zip"}, 415, "application/zip"),
    (gzip.compress(GOOD), JSON, 415, "Content-Encoding: gzip"),
    (gzip.compress(gzip.compress(GOOD)), ZIPPED, 415, "gzip"),
    (gzip.compress(archive()), ZIPPED, 415, "zip archive"),
    (gzip.compress(GOOD)[:-9], ZIPPED, 400, "is incomplete"),
    (gzip.compress(GOOD)[:-9] + b"123456789", ZIPPED, 400, "not a gzip stream"),
    (gzip.compress(GOOD) * 2, ZIPPED, 400, "followed by"),
    (GOOD, ZIPPED, 400, "not a gzip stream"),
    (GOOD, {**JSON, "Content-Encoding": "br"}, 415, "br"),
    (GOOD, {**JSON, "Content-Encoding": "gzip, gzip"}, 415, "gzip, gzip"),
    (GOOD, {**JSON, "Content-Encoding": "x" * 5000}, 415, "xxx"),
    (GOOD, {"Content-Type": "text/plain"}, 415, "text/plain"),
    (GOOD, {"Content-Type": ""}, 415, "no Content-Type"),
    (GOOD, {"Content-Type": "application/json" * 1000}, 415, "application/json"),
    (b'{"graph": {}, "graph": {}}', JSON, 422, "two values for one key"),
    (b"[" * 10_000 + b"]" * 10_000, JSON, 422, "too deeply"),
    (b'{"graph":' * 10_000 + b"1" + b"}" * 10_000, JSON, 422, "too deeply"),
    (b'{"budget": ' + b"9" * 5000 + b"}", JSON, 422, "no JSON"),
    (b'{"budget": "\\ud800"}', JSON, 422, "Invalid JSON"),
    (request_with(graph="\0" * 5000), JSON, 422, "graph"),
]


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"), NO_DOCUMENTS, ids=range(len(NO_DOCUMENTS))
)
def test_bodies_that_are_no_document_are_refused(
    http: httpx2.Client, body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    for where in ("/solve", "/sweeps", "/solve?dry_run=true"):
        assert says in refused(http.post(where, content=body, headers=headers), status)


def test_deeply_nested_bodies_are_refused(http: httpx2.Client, trace: dict[str, Any]) -> None:
    for depth in (33, 100, 190, 900, 10_000):
        deep = '{"kind":"list","children":[' * depth + '{"kind":"leaf"}' + "]}" * depth
        text = json.dumps({"trace": {**trace, "result": 0}, "budget": "70%"})
        body = text.replace('"result": 0', f'"result": {deep}').encode()
        refused(http.post("/solve", content=body, headers=JSON), 422)


# -- bodies that are too large --------------------------------------------------------------------


def zeros(size: int) -> Iterator[bytes]:
    for _ in range(size // MIB):
        yield b"0" * MIB


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        ("Content-Length: 333333333", 0),
        (f"Content-Length: {300 * MIB}", 300),
        ("Transfer-Encoding: chunked", 300),
    ],
    ids=["announced", "sent", "chunked"],
)
def test_bodies_of_300_megabytes_are_refused_at_once(
    server: Server, http: httpx2.Client, length: str, parts: int
) -> None:
    """With a length header, sent or not, and without one. The answer comes at once, without waiting
    for the rest."""
    is_chunked = "chunked" in length
    sent = (b"%x\r\n%s\r\n" % (MIB, part) if is_chunked else part for part in zeros(parts * MIB))
    answer, taken = conversation(server, length, sent)
    assert "over 67,108,864 bytes" in refused(answer, 413)
    assert answer.headers["connection"] == "close"
    assert taken < (100 if is_chunked else 64)


@pytest.mark.slow
def test_decompression_bombs_are_refused(http: httpx2.Client) -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as bomb:
        for part in zeros(1024 * MIB):
            bomb.write(part)
    assert "over 67,108,864 bytes" in refused(
        http.post("/solve", content=packed.getvalue(), headers=ZIPPED), 413
    )


def test_an_endless_gzip_stream_of_nothing_is_refused(server: Server, http: httpx2.Client) -> None:
    """Blocks without bytes: it unpacks to little, but takes long."""

    def endless() -> Iterator[bytes]:
        yield b"a\r\n%s\r\n" % gzip.compress(b"", mtime=0)[:10]
        for _ in range(300):
            yield b"f4240\r\n%s\r\n" % (b"\x00\x00\x00\xff\xff" * 200_000)

    head = "Transfer-Encoding: chunked\r\nContent-Encoding: gzip"
    answer, taken = conversation(server, head, endless())
    assert "over 67,108,864 bytes" in refused(answer, 413)
    assert taken < 100


def wide(inside: str, count: int) -> Callable[[dict[str, Any]], bytes]:
    def body(trace: dict[str, Any]) -> bytes:
        text = json.dumps({"trace": trace, "budget": "70%", "x": "HERE"})
        return text.replace('"HERE"', "[" + (inside + ",") * count + inside + "]").encode()

    return body


def within(place: str, inside: str, count: int) -> Callable[[dict[str, Any]], bytes]:
    def body(trace: dict[str, Any]) -> bytes:
        changed = {**trace, place: {"kind": "list", "children": ["HERE"]}}
        if place == "args":
            changed = {**trace, "nodes": [{**trace["nodes"][0], "args": ["HERE"]}]}
        text = json.dumps({"trace": changed, "budget": "70%"})
        return text.replace('"HERE"', (inside + ",") * count + inside).encode()

    return body


DENSE = {
    "numbers": wide("0", 30_000_000),
    "lists": wide("[]", 20_000_000),
    "objects": wide("{}", 20_000_000),
    "some numbers": wide("0", 2_900_000),
    "some lists": wide("[]", 1_400_000),
    "some objects": wide("{}", 1_400_000),
    "arguments": within("args", "0", 2_900_000),
    "argument lists": within("args", "[]", 1_400_000),
    "argument texts": within("args", '"' + "a" * 20 + '"', 2_500_000),
    "results": within("result", '{"kind":"leaf"}', 1_000_000),
    "few results": within("result", '{"kind":"leaf"}', 49_000),
    "one text": wide('"' + "a" * 60 * MIB + '"', 0),
    "long numbers": wide("9" * 4000, 15_000),
    "keys": lambda _: json.dumps({f"k{i}": 0 for i in range(1_000_000)}).encode(),
    "some keys": lambda _: json.dumps({f"k{i}": 0 for i in range(9_999)}).encode(),
    "operations": lambda trace: json.dumps(
        {"trace": {**trace, "nodes": [{}] * 60_000}, "budget": 1}
    ).encode(),
    "values": lambda _: request_with(
        graph={**chain(4), "values": [{"name": "v", "size_bytes": 1}] * 210_000}
    ),
}

QUICK_DENSE = {"one text", "long numbers", "values"}


@pytest.mark.quick_cases("one text")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK_DENSE else pytest.param(n, marks=pytest.mark.slow) for n in DENSE],
)
def test_dense_documents_cost_no_more_than_large_real_ones(
    server: Server, trace: dict[str, Any], name: str
) -> None:
    """They are within the limit of bytes, with as many parts as these hold. A body refused by its
    bytes costs nothing; one that must be parsed, no more than the largest real document."""
    body = DENSE[name](trace)
    assert len(body) < 64 * MIB
    before = resident_bytes(server)
    with server.http() as http:
        began = time.monotonic()
        refused(http.post("/solve", content=body, headers=JSON), 413, 422)
        seconds = time.monotonic() - began
        is_good(http, random.randrange(10**6, 10**9))
    grown = resident_bytes(server) - before
    print(f"{name}: {len(body) / 1e6:.0f} MB, {seconds:.2f} s, {grown / MIB:.0f} MiB")
    assert seconds < 45.0  # 1 to 4 on two idle cores, 19 on two busy ones
    assert grown < 3 * GROWTH_BYTES


# -- changed documents ----------------------------------------------------------------------------

ODD = st.one_of(
    st.sampled_from(
        [
            None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400,
            1e308, -1e308, 5e-324, 1e-300, 0.5, -0.0, float("nan"), float("inf"), float("-inf"),
            "", "a", "\0", "a\nb", "self", "lambda", "__import__('os')", "__class__", "os.system",
            "os.system.default", "aten.mm.default", "aten.convolution.default", "prims.x.y",
            "remat.accumulate.default", "aten.copy_.default", "\u0430ten.mm.default", "\u202ex",
            "backward_start", "x" * 3000, "cuda:0", "input", "tangent", "constant", "float32",
            [], {}, [[]], [None], {"ref": "x"}, {"ref": "__import__('os')"}, {"dtype": "os.system"},
            {"float": "nan"}, {"complex": [2**62, 1]}, {"kind": "leaf"}, [0] * 200, [2**62, 2**62],
        ]
    ),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=5),
)  # fmt: skip


def places(data: object) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON value."""
    if isinstance(data, (dict, list)):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from places(data[key])


def mutated(data: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with some places deleted, replaced, doubled, moved, renamed or deeply
    nested."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        all_places = list(places(document))
        container, key = all_places[data.draw(st.integers(0, len(all_places) - 1), "place")]
        match data.draw(
            st.sampled_from(["replace"] * 4 + ["delete", "move", "add", "deep"]), "how"
        ):
            case "replace":
                container[key] = data.draw(ODD, "value")
            case "delete":
                del container[key]
            case "move":
                other, name = all_places[data.draw(st.integers(0, len(all_places) - 1), "from")]
                container[key] = copy.deepcopy(other[name])
            case "deep":
                for _ in range(data.draw(st.sampled_from([2, 17, 40, 150]), "depth")):
                    container[key] = [container[key]]
            case _ if isinstance(container, dict):
                container[data.draw(st.sampled_from(["x", "__class__", "\0"]))] = container[key]
            case _:
                container.append(copy.deepcopy(container[key]))
    return document


@FUZZ
@hypothesis.given(data=st.data())
def test_mutated_traces_are_solved_or_refused(
    server: Server, trace: dict[str, Any], data: st.DataObject
) -> None:
    request = {"trace": trace, "budget": "80%", "options": {**QUICK}}
    if data.draw(st.booleans(), "priced"):
        request["options"]["costs"] = "roofline:h200"
    with server.http() as http:
        refused_or_ended(http, json.dumps(mutated(data, request)).encode())


@pytest.mark.slow
@FUZZ
@hypothesis.given(data=st.data())
def test_mutated_graphs_are_solved_or_refused(server: Server, data: st.DataObject) -> None:
    where = data.draw(st.sampled_from(["/solve", "/sweeps"]), "where")
    budget = {"budget": "70%"} if where == "/solve" else {"budgets": ["70%", "min"]}
    with server.http() as http:
        changed = mutated(data, {"graph": chain(4), **budget, "options": QUICK})
        refused_or_ended(http, json.dumps(changed).encode(), where)


@pytest.mark.slow_cases("values-0-succeeded", "operations-0-succeeded")
@pytest.mark.parametrize(
    ("name", "amount", "end"),
    [
        pytest.param("operations", 2**58, "succeeded", marks=pytest.mark.slow),
        pytest.param("operations", 2**63, "succeeded", marks=pytest.mark.slow),
        pytest.param("operations", 1e98, "succeeded", marks=pytest.mark.slow),
        ("operations", 0, "succeeded"),
        ("operations", 1e308, "refused"),
        ("operations", 1e-320, "refused"),
        pytest.param("values", 2**58, "succeeded", marks=pytest.mark.slow),
        pytest.param("values", 2**63, "refused", marks=pytest.mark.slow),
        ("values", 1e98, "refused"),
        ("values", 1e-320, "refused"),
        ("values", 0, "succeeded"),
    ],
)
def test_extreme_graphs_are_solved_or_refused(
    http: httpx2.Client, name: str, amount: float, end: str
) -> None:
    """All costs, or all sizes; sums overflow. A percentage of nothing is undefined."""
    key = "cost_s" if name == "operations" else "size_bytes"
    graph = chain(4)
    for record in graph[name]:
        record[key] = amount
    assert refused_or_ended(http, request_with(graph=graph)) == end
    sweep = {"graph": graph, "options": QUICK}
    assert refused_or_ended(http, json.dumps(sweep).encode(), "/sweeps") == end


@pytest.mark.slow_cases("changes8-succeeded")
@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"operations": [], "values": [], "results": [], "boundary": None}, "succeeded"),
        ({"operations": [], "values": []}, "refused"),
        ({"values": []}, "refused"),
        ({"boundary": 10**6}, "refused"),
        ({"boundary": 2**70}, "refused"),
        ({"boundary": 0}, "refused"),
        ({"results": [10**9]}, "refused"),
        ({"results": list(range(9))}, "infeasible"),
        ({"results": [0, 0, 0]}, "succeeded"),
        ({"constant_bytes": 2**62}, "refused"),
        ({"constant_bytes": 2**70}, "refused"),
    ],
)
def test_invalid_graphs_are_refused(http: httpx2.Client, changes: dict[str, Any], end: str) -> None:
    assert refused_or_ended(http, request_with(graph={**chain(4), **changes})) == end


def test_cycles_are_refused(http: httpx2.Client, trace: dict[str, Any]) -> None:
    graph = chain(4)
    graph["operations"][0]["inputs"] = [3]
    assert "before any operation" in refused(http.post("/solve", content=request_with(graph=graph),
                                                       headers=JSON), 422)  # fmt: skip
    backwards = {"trace": {**trace, "nodes": trace["nodes"][::-1]}, "budget": "70%"}
    assert "before it is defined" in refused(http.post("/solve", json=backwards), 422)


@pytest.mark.parametrize("late", ["tangent", "backward"])
def test_a_forward_that_views_the_backward_is_refused(
    http: httpx2.Client, trace: dict[str, Any], late: str
) -> None:
    """A view may name any tensor as its source, but not any storage."""
    tangent = next(p for p in trace["placeholders"] if p["kind"] == "tangent")
    nodes = copy.deepcopy(trace["nodes"])
    backward = [n for n in nodes if n["backward"] and not n["view"]]
    storage = tangent["storage"] if late == "tangent" else backward[0]["results"][0]["storage"]
    view = {**nodes[0], "name": "v", "view": True, "backward": False}
    result = {"name": "vr", "tensor": tangent["tensor"], "storage": storage, "position": -1}
    reader = {**nodes[0], "name": "w", "view": False, "backward": False, "args": [{"ref": "vr"}]}
    view_result = {**result, "name": "wr", "storage": len(trace["storage_bytes"])}
    nodes += [{**view, "args": [], "results": [result]}, {**reader, "results": [view_result]}]
    changed = {**trace, "nodes": nodes, "storage_bytes": [*trace["storage_bytes"], 4]}
    answer = http.post("/solve?dry_run=true", json={"trace": changed, "budget": "70%"})
    assert "v of the forward views" in refused(answer, 422)


@pytest.mark.parametrize(
    "target", ["os.system.default", "torch.load.default", "aten.from_file.default", "my.own.op"]
)
def test_operations_of_unknown_libraries_are_refused(
    http: httpx2.Client, trace: dict[str, Any], target: str
) -> None:
    changed = copy.deepcopy(trace)
    changed["nodes"][0]["target"] = target
    body = json.dumps({"trace": changed, "budget": "70%", "options": QUICK}).encode()
    # To the service, names of torch operations are data; `remat.lower` refuses this one.
    assert refused_or_ended(http, body) == ("succeeded" if target.startswith("aten") else "refused")
    if not target.startswith("aten"):
        answer = http.post("/solve", content=body, headers=JSON)
        assert f"{target}; this service accepts" in refused(answer, 422)


@pytest.mark.parametrize(
    "budget",
    [
        0, -1, 0.5, 1e308, 10**101, 10**4000, -(10**4000), True, None, [], {}, "", "nan",
        "inf", "0%", "-5%", "1e9", "9" * 99 + "%", "5 potatoes",
        "auto", "min\0", "٣GiB", "x" * 10**6, float("nan"), float("inf"),
    ],
    ids=lambda budget: repr(budget)[:20],
)  # fmt: skip
def test_invalid_budgets_are_refused(http: httpx2.Client, budget: object) -> None:
    for body in ({"budget": budget}, {"budget": None, "budgets": [budget]}):
        where = "/sweeps" if "budgets" in body else "/solve"
        refused(http.post(where, content=request_with(**body), headers=JSON), 422)


@pytest.mark.slow_cases("9000000TiB", "18446744073709551616")
@pytest.mark.parametrize("budget", [2**62, 2**64, 10**30, 1e99, "9" * 99, "9000000TiB"])
def test_huge_budgets_are_solved_or_refused(http: httpx2.Client, budget: float | str) -> None:
    assert refused_or_ended(http, request_with(budget=budget)) == "succeeded"


def test_too_many_budgets_are_refused(http: httpx2.Client) -> None:
    body = {"graph": chain(4), "budgets": ["50%"] * 101}
    assert "budgets" in refused(http.post("/sweeps", json=body), 422)


OPTIONS: list[dict[str, Any]] = [
    {"name": "auto", "near_slots": 10**18},
    {"name": "auto", "complete_slots": 10**18},
    {"name": "auto", "complete_slots": -1},
    {"name": "auto", "threads": 10**6},
    {"name": "auto", "threads": 0},
    {"name": "auto", "seed": -1},
    {"name": "auto", "seed": 2**40},
    {"name": "auto", "time_limit": 1e300},
    {"name": "auto", "time_limit": 0},
    {"name": "auto", "time_limit": float("nan")},
    {"name": "auto", "stall": -1.0},
    {"name": "auto", "gap": float("nan")},
    {"name": "auto", "gap": 1.0},
    {"name": "auto", "solver": "../../bin/sh"},
    {"name": "auto", "solver": "x" * 10**6},
    {"name": "auto", "order": "random"},
    {"name": "every_k", "k": 0},
    {"name": "every_k", "k": -3},
    {"name": "every_k", "k": 10**18},
    {"name": "rotor", "slots": -1},
    {"name": "rotor", "slots": 0},
    {"name": "rotor", "slots": 10**9},
    {"name": "knapsack", "pieces": 0},
    {"name": "knapsack", "pieces": 10**12},
    {"name": "knapsack", "choices": 0},
    {"name": "knapsack", "choices": 10**9},
    {"name": "selective", "choices": 0},
    {"name": "selective", "time_limit": 0},
    {"name": "revolve", "checkpoints": -1},
    {"name": "chen_greedy", "parameter_bytes": -1},
    {"name": "chen_greedy", "parameter_bytes": 2**70},
    {"name": "lp_rounding", "samples": 10**9},
    {"name": "lp_rounding", "samples": -1},
    {"name": "lp_rounding", "allowances": []},
    {"name": "lp_rounding", "allowances": [0.0] * 10**5},
    {"name": "lp_rounding", "allowances": [-5.0]},
    {"name": "lp_rounding", "max_operations": 10**9},
    {"name": "checkmate", "max_operations": 0},
    {"name": "checkmate", "unknown": 1},
    {"name": "keep_all", "name ": "x"},
    {"name": "__import__('os')"},
    {"name": ["auto"]},
    {"name": None},
    {},
]


@pytest.mark.parametrize("strategy", OPTIONS, ids=lambda strategy: str(strategy)[:40])
def test_invalid_options_are_refused(http: httpx2.Client, strategy: dict[str, Any]) -> None:
    body = request_with(options={"strategy": strategy})
    reason = refused(http.post("/solve", content=body, headers=JSON), 422)
    for option in {*strategy} - {"name", "time_limit", "solver"}:
        assert option in reason


@pytest.mark.slow
@FUZZ
@hypothesis.given(data=st.data())
def test_options_at_the_ends_of_their_ranges_are_checked(
    server: Server, data: st.DataObject
) -> None:
    """The ends of what is allowed, and a little beyond."""
    names = {
        "auto": ["near_slots", "complete_slots", "seed", "threads"],
        "every_k": ["k"],
        "revolve": ["checkpoints"],
        "rotor": ["slots"],
        "knapsack": ["pieces", "choices"],
        "selective": ["choices", "threads"],
        "chen_greedy": ["parameter_bytes"],
        "lp_rounding": ["samples", "max_operations"],
        "checkmate": ["max_operations"],
    }
    name = data.draw(st.sampled_from(sorted(names)), "strategy")
    option = data.draw(st.sampled_from(names[name]), "option")
    values = [None, -1, 0, 1, 2, 3, 7, 100, 1_000, 10_000, 10_001, 10**6, 10**7, 2**31, "1", 1.5]
    strategy = {"name": name, option: data.draw(st.sampled_from(values), "value")}
    if name in ("auto", "selective", "lp_rounding", "checkmate"):
        strategy["time_limit"] = 2.0
    with server.http() as http:
        refused_or_ended(http, request_with(options={"strategy": strategy}, budget="60%"))


# -- headers, paths, methods ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "statuses"),
    [
        ("POST", "/solve", {"Idempotency-Key": ""}, (422,)),
        ("POST", "/solve", {"Idempotency-Key": "a b"}, (422,)),
        ("POST", "/solve", {"Idempotency-Key": "x" * 201}, (422,)),
        ("POST", "/solve", {"Idempotency-Key": "\xe9"}, (422,)),
        ("POST", "/solve?dry_run=perhaps", {}, (422,)),
        ("GET", "/jobs?cursor=x", {}, (422,)),
        ("GET", "/jobs?cursor=-1", {}, (422,)),
        ("GET", "/jobs?cursor=%C2%B2", {}, (422,)),
        ("GET", "/jobs?cursor=" + "9" * 21, {}, (422,)),
        ("GET", "/jobs?limit=0", {}, (422,)),
        ("GET", "/jobs?limit=1e3", {}, (422,)),
        ("GET", "/jobs?status=lost", {}, (422,)),
        ("GET", "/jobs?status=%00", {}, (422,)),
        *(
            (method, f"/{what}/{id}{rest}", {}, (404, 405, 422))
            for method, what, rest in (
                ("GET", "jobs", ""),
                ("DELETE", "jobs", ""),
                ("GET", "jobs", "/events"),
                ("GET", "jobs", "/result"),
                ("GET", "sweeps", ""),
            )
            for id in ("%00", "a%00b", "..%2f..%2fetc", "a/b/c", "x" * 65, "x" * 5000, "%FF", "%0A")
        ),
        ("GET", "/static/%00", {}, (404,)),
        ("GET", "/static/..%2f..%2fapp.py", {}, (404,)),
        ("GET", "/static/" + "x" * 5000, {}, (404,)),
        ("GET", "/jobs", {"Host": "evil.example"}, (400,)),
        ("GET", "/livez", {"Host": "127.0.0.1.evil.example:80"}, (400,)),
        ("GET", "/jobs", {"Host": "localhost@evil.example"}, (400,)),
        ("GET", "/jobs", {"Host": "x" * 5000}, (400,)),
        *(
            (method, path, {}, (405,))
            for method in ("PUT", "PATCH", "HEAD", "OPTIONS", "TRACE")
            for path in ("/solve", "/sweeps", "/jobs", "/jobs/x", "/jobs/x/events", "/livez")
        ),
        ("GET", "/solve", {}, (405,)),
        ("DELETE", "/jobs", {}, (405,)),
        ("POST", "/jobs/x", {}, (405,)),
        ("POST", "/static/x", {}, (405,)),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_invalid_requests_are_refused(
    http: httpx2.Client, method: str, path: str, headers: dict[str, str], statuses: tuple[int, ...]
) -> None:
    sent = [(k.encode(), v.encode("latin-1")) for k, v in {**JSON, **headers}.items()]
    answer = http.request(method, path, headers=sent, content=GOOD if method == "POST" else b"")
    if method == "HEAD":
        assert answer.status_code in statuses
        assert answer.content == b""
    else:
        refused(answer, *statuses)
    if answer.status_code == 405:
        allowed = answer.headers["Allow"].split(", ")
        assert method not in allowed
        assert path != "/jobs/x" or allowed == ["DELETE", "GET"]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Last-Event-ID", "\xb2"),
        ("Last-Event-ID", "-1"),
        ("Last-Event-ID", "x"),
        ("Last-Event-ID", "9" * 20),
        ("Accept", "text/event-stream;q=nan"),
        ("Accept", "application/json;q=" + "9" * 400),
        ("Accept", "*/*" + ",*/*;q=x" * 5000),
        ("Accept", ";;;,,,"),
        ("If-None-Match", "\xff" * 500),
        ("Prefer", "wait=" + "9" * 5000),
        ("Accept-Encoding", "gzip;q=0, \xff"),
        ("X-Request-ID", "\xff\xfe"),
        ("Authorization", "Bearer \xff"),
        ("Authorization", "Bearer remat_" + "_" * 5000),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_unusual_headers_do_no_harm(http: httpx2.Client, header: str, value: str) -> None:
    id = http.post("/solve", content=GOOD, headers=JSON).json()["id"]
    finished(http, id)
    sent = [(header.encode(), value.encode("latin-1"))]
    for path in (f"/jobs/{id}", f"/jobs/{id}/events", f"/jobs/{id}/result", "/jobs", "/livez"):
        answer = http.get(path, headers=sent)
        assert answer.status_code == 200 or refused(answer, 406, 422)
    assert http.post("/solve", content=GOOD, headers=[*sent, *JSON.items()]).status_code < 300


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 99999999999999999999999999", 400),
        ("Content-Length: 99999999999999999", 413),
        ("Content-Length: -1", 400),
        ("Content-Length: 1e3", 400),
        ("Content-Length: 5\r\nContent-Length: 6", 400),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: gzip", 400),
        ("Transfer-Encoding: chunked\r\nX: " + "x" * 100_000, 400),
        ("X-Nothing: \0", 400),
        ("Host: other", 400),
    ],
    ids=lambda head: ascii(head)[:40],
)
def test_invalid_http_framing_is_refused(
    server: Server, http: httpx2.Client, head: str, status: int
) -> None:
    """By the HTTP parser or the service, and the connection is closed."""
    answer, _ = conversation(server, f"{head}\r\nConnection: close", [b"0\r\n\r\n"])
    assert answer.status_code == status
    assert answer.text == "Invalid HTTP request received." or refused(answer, status)


def test_a_truncated_body_is_refused(server: Server, http: httpx2.Client) -> None:
    before = statuses(server, "/solve")
    for _ in range(20):
        with socket.create_connection(address(server), timeout=10) as plain:
            plain.sendall(b"POST /solve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n")
            plain.sendall(b"Content-Type: application/json\r\n\r\n" + GOOD[:500])
    wait_for(lambda: statuses(server, "/solve") == before + [400] * 20)


def test_unknown_methods_create_no_metrics(server: Server, http: httpx2.Client) -> None:
    with closing(HTTPConnection(*address(server), timeout=30)) as plain:
        for i in range(20):
            plain.request(f"MADEUP{i}", "/jobs")
            plain.getresponse().read()
    assert "MADEUP" not in http.get("/metrics").text


def address(server: Server) -> tuple[str, int]:
    host, _, port = server.url.rpartition("//")[2].rpartition(":")
    return host, int(port)


def conversation(server: Server, head: str, parts: Iterable[bytes]) -> tuple[httpx2.Response, int]:
    """Return the answer to a POST /solve until the connection is closed, and how many parts of
    the body were sent before it: as many as possible without an answer."""
    text = f"POST /solve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    taken, answer = 0, b""
    with socket.create_connection(address(server), timeout=60) as plain:
        plain.sendall(f"{text}\r\n\r\n".encode("latin-1"))
        with suppress(ConnectionError):
            for part in parts:
                if select.select([plain], [], [], 0)[0]:
                    break
                plain.sendall(part)
                taken += 1
        with suppress(ConnectionError):
            while more := plain.recv(1 << 16):
                answer += more
    top, _, content = answer.partition(b"\r\n\r\n")
    line, *lines = top.decode("latin-1").split("\r\n")
    assert line.startswith("HTTP/1.1 "), answer
    headers = [
        (name.encode(), value.encode()) for name, _, value in (h.partition(": ") for h in lines)
    ]
    return httpx2.Response(int(line.split()[1]), headers=headers, content=content), taken


def statuses(server: Server, path: str) -> list[int]:
    """Return the statuses of the requests of a path so far, from the service's log."""
    lines = server.log.read_text().splitlines()
    records = [
        json.loads(line) for line in lines if f'"path": "{path}"' in line and line[-1] == "}"
    ]
    return [record["status"] for record in records]
