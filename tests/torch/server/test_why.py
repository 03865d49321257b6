"""`POST /why` on a real server: the library's answer, and its refusals."""

from __future__ import annotations

import gzip
import json
import pickle

import httpx2
import pytest
from tests.helpers.paths import DATA
from tests.helpers.service.server import Server

import remat
from remat.errors import DocumentError
from remat.service.wire import WhyResult

SNAPSHOT = gzip.decompress((DATA / "snapshots" / "python-writer.pickle.gz").read_bytes())
ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.18 GiB of which 1.00 GiB is free. Process 7 has 40.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 38.18 GiB memory in use. Of the allocated "
    "memory 37.00 GiB is allocated by PyTorch, and 700.00 MiB is reserved by PyTorch but "
    "unallocated."
)


def posted(
    http: httpx2.Client, body: bytes, media: str = "application/octet-stream"
) -> httpx2.Response:
    headers = {"Prefer": "wait=60", "Content-Type": media}
    return http.post("/why", content=body, headers=headers)


def test_the_answer_is_that_of_the_library(http: httpx2.Client) -> None:
    answer = posted(http, SNAPSHOT)
    assert answer.status_code == 200, answer.text
    explanation = WhyResult.model_validate_json(answer.content).explanation
    assert explanation == remat.why(SNAPSHOT)
    assert json.loads(answer.content)["explanation"] == json.loads(explanation.to_json())


def test_the_page_is_that_of_the_library(http: httpx2.Client) -> None:
    job = http.post("/why", content=SNAPSHOT, headers={"Content-Type": "application/octet-stream"})
    posted(http, SNAPSHOT)  # waits for the same answer
    page = http.get(f"/jobs/{job.json()['id']}/result", headers={"Accept": "text/html"})
    assert page.text == remat.why(SNAPSHOT).html()
    assert "sandbox" in page.headers["content-security-policy"]


def test_the_client_explains_files_and_texts(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("why") / "snapshot.pickle"
    path.write_bytes(SNAPSHOT)
    with server.client() as client:
        assert client.why(path).findings == remat.why(path).findings
        assert client.why(ERROR) == remat.why(ERROR)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (pickle.dumps(print), "opcode"),
        (SNAPSHOT[:-500], "cut off"),
        (b"hello", "not a memory snapshot"),
        (gzip.compress(SNAPSHOT), "not a memory snapshot"),
        (pickle.dumps({"segments": [{"blocks": 1}]}), "no list"),
    ],
)
def test_hostile_files_are_refused(http: httpx2.Client, body: bytes, words: str) -> None:
    answer = posted(http, body)
    problem = answer.json() if answer.status_code == 422 else answer.json()["problem"]
    assert words in problem["detail"]


def test_other_bodies_are_refused(http: httpx2.Client) -> None:
    assert posted(http, b"").status_code == 400
    assert posted(http, SNAPSHOT, "application/json").status_code == 415
    answer = http.post("/solve", content=SNAPSHOT, headers={"Content-Type": "application/json"})
    assert answer.status_code == 415  # other routes take no pickle


def test_the_client_raises_the_errors_of_the_library(server: Server) -> None:
    with server.client() as client, pytest.raises(DocumentError, match="opcode"):
        client.why(pickle.dumps(print))
