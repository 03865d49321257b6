"""`POST /fit` on a real server: the library's answer, without torch, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from tests.helpers.service import server as servers
from tests.helpers.service.server import chain
from torch import nn

import remat
from remat.service.wire import FitResult

MEMORY_BYTES = 140 << 20


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    with servers.running(tmp_path_factory.mktemp("fit")) as server, server.http() as client:
        yield client


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(1024, 256)), torch.empty(2048, 256)


def trace_data(device: str) -> dict[str, Any]:
    model, x = model_and_input()
    return json.loads(remat.trace(model, (x,), device=device).to_json())


def posted(http: httpx2.Client, **request: Any) -> httpx2.Response:
    return http.post("/fit", json=request, headers={"Prefer": "wait=60"})


def test_the_answer_is_that_of_the_library(http: httpx2.Client) -> None:
    request = {"trace": trace_data("h100"), "memory_bytes": MEMORY_BYTES, "batch": 2048}
    answer = posted(http, **request)
    assert answer.status_code == 200, answer.text
    result = FitResult.model_validate_json(answer.content)
    model, x = model_and_input()
    expected = remat.fit(model, (x,), device="h100", memory=MEMORY_BYTES, batch=2048)
    assert not result.fits
    assert result.fit.memory == expected.memory
    assert result.fit.usable_bytes == MEMORY_BYTES
    services = {o.name: (o.peak_bytes, o.fits) for o in result.fit.options}
    library = {o.name: (o.peak_bytes, o.fits) for o in expected.options}
    assert services.keys() == library.keys()
    assert services["optimizer adamw-8bit"] == library["optimizer adamw-8bit"]
    location = answer.headers["location"]
    assert http.get(location).json()["kind"] == "fit"
    picture = http.get(f"{location}/result?format=svg")
    assert picture.status_code == 404
    assert "JSON only" in picture.text


def test_another_gpu_has_its_own_memory_and_a_note(http: httpx2.Client) -> None:
    trace = trace_data("h100")
    answers = [posted(http, trace=trace, gpu=gpu).json()["fit"] for gpu in ("a100", "h200")]
    assert [answer["device"] for answer in answers] == ["a100", "h200"]
    assert answers[0]["usable_bytes"] < answers[1]["usable_bytes"]
    assert all("traced for h100" in answer["notes"][0] for answer in answers)


def test_a_dry_run_has_the_sizes(http: httpx2.Client) -> None:
    body = {"trace": trace_data("h100")}
    sizes = http.post("/fit?dry_run=true", json=body).json()
    assert sizes["costs"] == "roofline h100"
    assert sizes["baseline_peak_bytes"] > sizes["constant_bytes"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trace": "cpu"}, "trace for one, which need not be here: remat.trace"),
        ({"optimizer": "lion"}, "the memory of the optimizer 'lion' is not known"),
        ({"gpu": "h1000"}, "the GPU 'h1000' has no data sheet"),
        ({"gpu": "mi300x"}, "the GPU 'mi300x' has no data sheet"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"batch": 0}, "batch"),
        ({"budget": "60%"}, "budget"),
        ({"trace": None, "graph": chain(3)}, "trace"),
    ],
)
def test_wrong_requests_are_refused(
    http: httpx2.Client, fields: dict[str, Any], message: str
) -> None:
    if fields.get("trace") == "cpu":
        fields = {"trace": trace_data("cpu")}
    answer = posted(http, **({"trace": trace_data("h100")} | fields))
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["detail"]
