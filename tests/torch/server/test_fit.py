"""`POST /fit` on a real server: the library's answer, without torch, and its refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest
import torch
from tests.helpers.service.server import Server, chain
from torch import nn

import remat
from remat.costs.devices import DEVICES
from remat.costs.optimizer_memory import OPTIMIZERS
from remat.errors import BudgetError
from remat.fitting.answer import GPUS, fit_trace
from remat.progress import Progress
from remat.report.fit import FitOption
from remat.service.wire import FitResult
from remat.solution import Solution
from remat.strategies.base import Task
from remat_server.problems import out_of_memory_problem
from remat_server.work import solving
from remat_server.work.messages import ProgressMessage

MEMORY_BYTES = 140 << 20


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(1024, 256)), torch.empty(2048, 256)


def trace_data(device: str) -> dict[str, Any]:
    model, x = model_and_input()
    return json.loads(remat.trace(model, (x,), device=device).to_json())


def posted(http: httpx2.Client, **request: Any) -> httpx2.Response:
    return http.post("/fit", json=request, headers={"Prefer": "wait=60"})


@pytest.mark.slow
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


def test_the_client_returns_the_librarys_answer(server: Server) -> None:
    model, x = model_and_input()
    trace = remat.trace(model, (x,), device="h100")
    with server.client() as client:
        fit = client.fit(trace, memory="1GiB", batch=2048)
        assert (
            fit.describe()
            == remat.fit(model, (x,), device="h100", memory="1GiB", batch=2048).describe()
        )
        shards: dict[str, Any] = {"gpus": 16, "shard": "hybrid:8", "network": 1e9}
        assert (
            client.fit(trace, memory="1GiB", **shards).describe()
            == remat.fit(model, (x,), device="h100", memory="1GiB", **shards).describe()
        )
        with pytest.raises(remat.RematError, match="the shard is 'zero3'; pass 'full'"):
            client.fit(trace, gpus=8, shard="zero3")
        with pytest.raises(remat.RematError, match="trace the model in the dtype"):
            client.fit(trace, gpus=8, mixed_precision_param="bfloat16")
        assert client.fit(trace, device="a100").device == "a100"
        with pytest.raises(remat.RematError, match="the GPU 'h1000' has no data sheet"):
            client.fit(trace, device="h1000")
        with pytest.raises(remat.RematError, match="the memory of the optimizer 'lamb'"):
            client.fit(trace, optimizer="lamb")
        with pytest.raises(BudgetError, match="the memory is '0'"):
            client.fit(trace, memory=0)
        with pytest.raises(remat.RematError, match="accepts up to 3600 s"):
            client.fit(trace, time_limit=1e6)
        with pytest.raises(TypeError, match=r"Client.fit needs a Trace; got a Sequential"):
            client.fit(model)


@pytest.mark.slow
def test_another_gpu_has_its_own_memory_and_a_note(http: httpx2.Client) -> None:
    trace = trace_data("h100")
    answers = [posted(http, trace=trace, gpu=gpu).json()["fit"] for gpu in ("a100", "h200")]
    assert [answer["device"] for answer in answers] == ["a100", "h200"]
    assert answers[0]["usable_bytes"] < answers[1]["usable_bytes"]
    assert all("traced for h100" in answer["notes"][0] for answer in answers)


def test_one_time_limit_ends_the_search_for_all_options(http: httpx2.Client) -> None:
    request = {"trace": trace_data("h100"), "memory_bytes": MEMORY_BYTES}
    fit = posted(http, **request, time_limit=1e-3).json()["fit"]
    names = [option["name"] for option in fit["options"]]
    assert names
    assert not any("plan" in name or "batches" in name for name in names), "they take a solver"
    assert "the time limit of 0.001 s ended the search" in fit["notes"][0]


class Reporting(remat.Auto):
    """A strategy that reports its time limit."""

    def run(self, task: Task) -> Solution:
        assert task.progress is not None
        task.progress(Progress("cost", self.time_limit, incumbent=0.5))
        return super().run(task)


def test_solves_for_plans_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "DEFAULT_STRATEGY", Reporting())
    messages: list[ProgressMessage] = []
    body = json.dumps({"trace": trace_data("h100"), "memory_bytes": MEMORY_BYTES}).encode()
    limits: dict[str, Any] = {"threads": 1, "time_limit_s": 20.0, "device": ""}
    solving.solve_request("fit", body, on_progress=messages.append, **limits)
    assert any(message.is_incumbent for message in messages)
    stages = list(dict.fromkeys(message.progress.stage for message in messages))
    assert stages[0] == "memory of the step"
    numbers = [re.match(r"option (\d+) of (\d+): ", stage) for stage in stages[1:]]
    pairs = [tuple(map(int, number.groups())) for number in numbers if number]
    assert pairs == [(number, len(numbers)) for number in range(1, 1 + len(numbers))]


def test_no_solve_starts_after_the_time_limit() -> None:
    model, x = model_and_input()
    trace = remat.trace(model, (x,), device="h100")
    reports: list[Progress] = []

    def options(time_limit_s: float) -> tuple[FitOption, ...]:
        return fit_trace(
            trace,
            "adamw",
            memory_bytes=MEMORY_BYTES,
            strategy=Reporting(time_limit=99),
            time_limit_s=time_limit_s,
            progress=reports.append,
        ).options

    assert not any("plan" in option.name for option in options(1e-9))
    assert {report.phase for report in reports} == {"stage"}
    assert any("plan" in option.name for option in options(20.0))
    assert max(report.elapsed_s for report in reports) <= 20


def test_the_page_has_the_names_of_the_service(http: httpx2.Client) -> None:
    answer = http.get("/static/choices.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    lists = dict(re.findall(r"export const (\w+) = (.*);", answer.text))
    assert json.loads(lists["OPTIMIZERS"]) == [*OPTIMIZERS]
    assert json.loads(lists["GPUS"]) == [*GPUS]
    assert json.loads(lists["DEVICES"]) == [*DEVICES]


def test_errors_name_the_fields_of_this_request(http: httpx2.Client) -> None:
    problem = http.post("/fit", content=b"", headers={"Content-Type": "application/json"}).json()
    assert '{"trace": ..., "optimizer": "adamw"}' in problem["detail"]
    assert "budget" not in problem["detail"]
    assert "near_slots" in out_of_memory_problem("solve", 10).detail
    assert "near_slots" not in out_of_memory_problem("fit", 10).detail


def test_a_dry_run_has_the_sizes(http: httpx2.Client) -> None:
    body = {"trace": trace_data("h100")}
    sizes = http.post("/fit?dry_run=true", json=body).json()
    assert sizes["costs"] == "roofline h100"
    assert sizes["baseline_peak_bytes"] > sizes["constant_bytes"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trace": "cpu"}, "trace for one, which need not be here: remat.trace"),
        ({"optimizer": "lamb"}, "the memory of the optimizer 'lamb' is not known"),
        ({"gpu": "h1000"}, "the GPU 'h1000' has no data sheet"),
        ({"gpu": "mi300x"}, "the GPU 'mi300x' has no data sheet"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"batch": 0}, "batch"),
        ({"time_limit": 0}, "time_limit"),
        ({"time_limit": 1e6}, "the time limit is 1e+06 s; this service accepts up to 3600 s"),
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
