"""The service as a new user meets it: a real server process, curl, and `remat.Client`."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
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
from tests.helpers.training.models import gpt2, language_model
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step

import remat
from remat.documents.plan import GraphRecord
from remat.service.wire import SolveRequest, SolveResult, SweepRequest
from remat.strategies import ChenSqrt, KeepAll

QUICK = remat.Auto(gap=0.02)


@pytest.fixture(scope="module")
def graph() -> remat.Graph:
    return GraphRecord.model_validate_json(json.dumps(chain())).to_graph()


def test_a_request_keeps_budgets_as_written(graph: remat.Graph) -> None:
    record, budgets = GraphRecord.of(graph), ["60%", 10**20, 2.5e9, " 8 GiB", "MIN"]
    request = SweepRequest(graph=record, budgets=tuple(budgets))
    text = request.model_dump_json()
    assert [repr(budget) for budget in json.loads(text)["budgets"]] == [
        repr(budget) for budget in budgets
    ]
    assert SweepRequest.model_validate_json(text) == request
    single = SolveRequest(graph=record, budget=budgets[2])
    assert json.loads(single.model_dump_json())["budget"] == budgets[2]
    for wrong in ("auto", True, "0%", "1" * 101):
        with pytest.raises(ValueError, match="the budget"):
            SolveRequest(graph=record, budget=wrong)


# -- the first steps of a user ----------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_plan_requested_by_curl_trains_within_its_budget(server: Server, tmp_path: Path) -> None:
    case = gpt2(dropout=0.0)
    trace = remat.measure(
        remat.trace(case.model, case.args, case.kwargs), device=remat.Roofline("h200")
    )
    body = tmp_path / "request.json.gz"
    text = '{"trace": ' + trace.to_json() + ', "budget": "60%"}'
    body.write_bytes(gzip.compress(text.encode()))

    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--fail-with-body", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    job = json.loads(
        curl(
            f"{server.url}/solve",
            "--header",
            "Content-Type: application/json",
            "--header",
            "Content-Encoding: gzip",
            "--data-binary",
            f"@{body}",
        )
    )
    curl("--no-buffer", "--max-time", "120", f"{server.url}/jobs/{job['id']}/events")
    text = curl("--compressed", f"{server.url}/jobs/{job['id']}/result")
    answer = SolveResult.model_validate_json(text)

    assert answer.program is not None
    plan = answer.plan.to_plan(remat.Plan)
    gm = remat.lower(answer.program, case.model, plan=plan)
    eager = eager_step(case)
    actual = run_step(gm, case)
    assert_same(actual, eager)
    assert plan.budget_bytes < plan.baseline_peak_bytes
    assert actual.peak_bytes <= plan.budget_bytes < eager.peak_bytes
    assert "roofline" in answer.costs


@pytest.mark.slow
def test_the_client_optimizes_as_the_library_does(server: Server) -> None:
    case = gpt2(dropout=0.0)
    costs = remat.Roofline("h200")
    # With one thread, the choice among plans of equal time is deterministic.
    one_thread = remat.Auto(threads=1)
    seen: list[remat.Progress] = []
    with server.client() as client:
        gm = client.optimize(
            case.model,
            "60%",
            case.args,
            case.kwargs,
            strategy=one_thread,
            costs=costs,
            progress=seen.append,
        )
    local = remat.optimize(
        case.model, "60%", case.args, case.kwargs, strategy=one_thread, costs=costs
    )
    assert gm.plan is not None
    assert local.plan is not None
    assert gm.plan.schedule == local.plan.schedule
    assert gm.plan.overhead == local.plan.overhead
    assert gm.plan.peak_bytes <= gm.plan.budget_bytes
    eager = eager_step(case)
    actual = run_step(gm, case)
    assert_same(actual, eager)
    assert actual.peak_bytes <= gm.plan.budget_bytes


@pytest.mark.slow
def test_the_client_applies_reserve_and_rng_options(server: Server) -> None:
    case = gpt2(layers=1)
    with server.client() as client:
        gm = client.optimize(
            case.model, "100MiB", case.args, case.kwargs, strategy=QUICK,
            costs=remat.Roofline("h200"), reserve="60MiB", cuda_graphs=True,
        )  # fmt: skip
    assert gm.plan is not None
    assert gm.plan.budget_bytes == 40 << 20
    assert gm.plan.stats["reserved_for_others_bytes"] == 60 << 20
    assert gm.plan.stats["cuda_graphs"] is True


@pytest.mark.slow
def test_the_service_measures_costs_where_it_has_the_device(server: Server) -> None:
    case = gpt2(layers=1, dropout=0.0)
    with server.client() as client:
        gm = client.optimize(
            case.model, "85%", case.args, case.kwargs, strategy=QUICK, costs="measure"
        )
    assert gm.plan is not None
    assert "measured" in str(gm.plan.stats["cost_source"])
    assert_same(run_step(gm, case), eager_step(case))


@pytest.mark.slow
def test_the_service_prices_traces_by_a_data_sheet(server: Server) -> None:
    case = gpt2(layers=1, dropout=0.0)
    trace = remat.trace(case.model, case.args, case.kwargs)
    with server.client() as client:
        plan = client.solve(trace, "85%", QUICK, costs="roofline:a100")
    assert plan.stats["cost_source"] == "roofline a100"
    local = remat.solve(remat.measure(trace, device=remat.Roofline("a100")), "85%", QUICK)
    assert plan.schedule == local.schedule


@pytest.mark.slow
@pytest.mark.parametrize(
    "costs",
    [
        "roofline:cpu",
        *(
            pytest.param(costs, marks=pytest.mark.slow)
            for costs in (remat.Roofline("cpu"), "measure")
        ),
    ],
)
def test_the_client_splits_what_a_budget_requires(
    server: Server, costs: str | remat.Roofline
) -> None:
    """The pieces are chosen where their costs are: here, or by the service."""
    case = language_model()
    with server.client() as client:
        with pytest.raises(remat.InfeasibleBudget):
            client.optimize(case.model, "40%", case.args, strategy=QUICK, costs=costs, split="off")
        gm = client.optimize(case.model, "40%", case.args, strategy=QUICK, costs=costs)
    assert gm.plan is not None
    assert gm.plan.graph.splits
    actual = run_step(gm, case)
    assert_same(actual, eager_step(case))
    assert actual.peak_bytes <= 0.4 * gm.plan.baseline_peak_bytes


def test_pieces_need_a_trace_and_costs(server: Server, graph: remat.Graph) -> None:
    case = language_model()
    trace = remat.measure(remat.trace(case.model, case.args), remat.Roofline("cpu"))
    needs_costs = pytest.raises(remat.RematError, match=r"the pieces .* need costs")
    with server.client() as client, needs_costs:
        client.plan(trace, "40%", QUICK, split="auto")
    with pytest.raises(ValueError, match="only a trace can be split"):
        SolveRequest(graph=GraphRecord.of(graph), budget="40%", split="auto")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trace_for_a_device_that_no_worker_has_is_refused(server: Server) -> None:
    case = gpt2(layers=1, dropout=0.0)
    trace = remat.trace(case.model, case.args, case.kwargs)
    moved = json.loads(trace.to_json().replace('"device":"cpu"', '"device":"cuda:0"'))
    with server.http() as http:
        answer = http.post("/solve", json={"trace": moved, "budget": "70%"})
    assert answer.status_code == 409
    assert answer.json()["type"].endswith("no-device")
    assert "roofline" in answer.json()["detail"]


# -- errors -----------------------------------------------------------------------------------


def test_the_client_raises_the_errors_of_the_library(server: Server, graph: remat.Graph) -> None:
    with server.client() as client:
        for budget, strategy, is_proved, least in (
            (250, remat.Auto(), True, 300),
            ("5%", remat.Auto(), True, 300),
            (350, ChenSqrt(), False, 800),
        ):
            with pytest.raises(remat.InfeasibleBudget) as remote:
                client.solve(graph, budget, strategy)
            with pytest.raises(remat.InfeasibleBudget) as local:
                remat.solve(graph, budget, strategy)
            assert str(remote.value) == str(local.value)
            assert remote.value.min_feasible_bytes == local.value.min_feasible_bytes == least
            assert remote.value.is_proved is local.value.is_proved is is_proved
        for wrong in ("8 potatoes", True, -1):
            with pytest.raises(remat.BudgetError):
                client.solve(graph, wrong)
            with pytest.raises(remat.BudgetError):
                client.sweep(graph, ["60%", wrong])
        for refused in (
            lambda: client.solve(graph, "60%", costs="measure"),
            lambda: client.solve(graph, "60%", costs="roofline:abacus"),
            lambda: client.sweep(graph, range(400, 600)),
        ):
            with pytest.raises(remat.RematError, match="cannot be sent to a service"):
                refused()
        with pytest.raises(remat.SolverError, match="does not offer the solver"):
            client.solve(graph, "60%", remat.Auto(solver="GUROBI"))


def test_the_client_reports_an_unreachable_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.service.connection.MAX_OUTAGE_S", 0.0)
    nobody = remat.Client(f"http://127.0.0.1:{servers.free_port()}")
    with pytest.raises(remat.ServiceError, match="is it running"):
        nobody.job("x")
    with pytest.raises(remat.ServiceError, match="no address"):
        remat.Client("host:8000")


def test_the_client_reports_an_address_of_another_service(server: Server) -> None:
    with remat.Client(server.url + "/static") as client, pytest.raises(remat.ServiceError):
        client.job("x")


# -- solving ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_of_the_service_are_those_of_the_library(
    server: Server, graph: remat.Graph
) -> None:
    with server.client() as client:
        for strategy in (remat.Auto(), ChenSqrt(), remat.Exact(), KeepAll()):
            budget = "100%" if isinstance(strategy, KeepAll) else "70%"
            remote = client.solve(graph, budget, strategy)
            local = remat.solve(graph, budget, strategy)
            assert remote.overhead == local.overhead
            assert remote.status == local.status
            assert remote.lower_bound == local.lower_bound


@pytest.mark.slow
def test_a_sweep_of_the_service_is_that_of_the_library(server: Server, graph: remat.Graph) -> None:
    budgets = [200, "min", "50%", "70%", "100%"]
    with server.client() as client:
        remote = client.sweep(graph, budgets)
        assert client.sweep(graph, [200, 250]) == remat.sweep(graph, [200, 250]) == []
        assert client.sweep(graph, []) == remat.sweep(graph, []) == []
    local = remat.sweep(graph, budgets)
    assert len(remote) == 4
    assert [p.overhead for p in remote] == [p.overhead for p in local]
    assert [p.budget_bytes for p in remote] == [p.budget_bytes for p in local]


def test_an_equal_request_is_answered_from_the_store(http: httpx2.Client) -> None:
    first = post(http, budget=1234567)
    finished_job = finished(http, first.json()["id"])
    second = post(http, budget=1234567)
    assert second.json()["id"] != first.json()["id"]
    assert second.json()["status"] == "succeeded"
    assert second.json()["summary"] == finished_job["summary"]
    bodies = [http.get(f"/jobs/{r.json()['id']}/result").content for r in (first, second)]
    assert bodies[0] == bodies[1]


def test_prefer_wait_answers_with_the_result(http: httpx2.Client) -> None:
    response = http.post(
        "/solve", json={"graph": chain(), "budget": "70%"}, headers={"Prefer": "wait=30"}
    )
    assert response.status_code == 200
    assert response.headers["Preference-Applied"] == "wait=30"
    assert response.json()["plan"]["peak_bytes"] <= response.json()["plan"]["budget_bytes"]


def test_an_infeasible_budget_is_a_result(http: httpx2.Client) -> None:
    job = finished(http, post(http, budget=200).json()["id"])
    assert job["status"] == "infeasible"
    assert job["problem"]["min_feasible_bytes"] == 300
    result = http.get(f"/jobs/{job['id']}/result")
    assert result.status_code == 200
    assert result.json()["problem"]["min_feasible_bytes"] == 300


def test_a_dry_run_returns_the_sizes_and_creates_no_job(http: httpx2.Client) -> None:
    before = http.get("/jobs").json()["jobs"]
    response = http.post("/solve?dry_run=true", json={"graph": chain(), "budget": "50%"})
    assert response.status_code == 200
    assert response.json()["operations"] == 25
    assert response.json()["baseline_peak_bytes"] == 1400
    assert http.get("/jobs").json()["jobs"] == before


def test_an_idempotency_key_creates_one_job(http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    body = {"graph": chain(), "budget": "80%"}
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(http.post, "/solve", json=body, headers=headers) for _ in range(8)]
        ids = [future.result().json()["id"] for future in futures]
    assert len(set(ids)) == 1
    other = http.post("/solve", json={**body, "budget": "90%"}, headers=headers)
    assert other.status_code == 409
    assert other.json()["type"].endswith("idempotency-key-reused")


def test_a_result_before_the_end_is_a_conflict(http: httpx2.Client) -> None:
    job = post(http, graph=chain(40), budget="35%", options={"strategy": HARD}).json()
    early = http.get(f"/jobs/{job['id']}/result")
    assert early.status_code == 409
    assert early.headers["content-type"] == "application/problem+json"
    assert early.headers["Retry-After"] == "1"
    http.delete(f"/jobs/{job['id']}")


@pytest.mark.slow
def test_an_unchanged_job_is_answered_with_304(http: httpx2.Client) -> None:
    id = post(http, budget="75%").json()["id"]
    finished(http, id)
    tag = http.get(f"/jobs/{id}").headers["ETag"]
    for header in (tag, f"W/{tag}", f'"x", {tag}', f"{tag},W/{tag}", "*"):
        same = http.get(f"/jobs/{id}", headers={"If-None-Match": header})
        assert same.status_code == 304, header
        assert same.content == b""
        assert same.headers["ETag"] == tag
    for other in ("", '"x"', tag.strip('"'), f"{tag}x"):
        assert http.get(f"/jobs/{id}", headers={"If-None-Match": other}).status_code == 200, other


@pytest.mark.slow
def test_jobs_are_listed_in_pages(http: httpx2.Client) -> None:
    job_ids = [post(http, budget=2000 + i).json()["id"] for i in range(5)]
    for id in job_ids:
        finished(http, id)
    listed: list[str] = []
    cursor = None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = http.get("/jobs", params=query).json()
        listed += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert listed[:5] == job_ids[::-1]
    assert len(listed) == len(set(listed))
    page = http.get("/jobs", params={"status": "succeeded", "limit": 5}).json()
    assert [job["id"] for job in page["jobs"]] == job_ids[::-1]


# -- events and cancellation --------------------------------------------------------------------


def test_events_report_the_states_of_a_job_and_resume(http: httpx2.Client) -> None:
    id = post(http, graph=chain(16), budget="45%").json()["id"]
    story = list(events(http, id))
    kinds = [kind for _, kind, _ in story]
    assert kinds[0] == "status"
    assert kinds[-1] == "done"
    assert [number for number, _, _ in story] == list(range(1, len(story) + 1))
    assert {"status": "running"} in [data for _, _, data in story]
    assert story[-1][2] == {"status": "succeeded"}
    assert list(events(http, id, last="2")) == story[2:]


def test_events_of_an_unknown_job_are_a_404(http: httpx2.Client) -> None:
    answer = http.get("/jobs/nothing/events")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_cancellation_frees_the_core(server: Server, http: httpx2.Client) -> None:
    job = post(http, graph=chain(60), budget="22%", options={"strategy": HARD}).json()
    wait_for(lambda: http.get(f"/jobs/{job['id']}").json()["status"] == "running")
    solving = wait_for(lambda: solving_processes(server.environment["REMAT_DATA_DIR"]))
    assert http.delete(f"/jobs/{job['id']}").status_code == 202
    wait_for(lambda: not solving & solving_processes(server.environment["REMAT_DATA_DIR"]))
    assert http.get(f"/jobs/{job['id']}").json()["status"] == "cancelled"
    assert http.delete(f"/jobs/{job['id']}").status_code == 204
    assert http.get(f"/jobs/{job['id']}").status_code == 404


@pytest.mark.slow
def test_a_cancelled_client_cancels_its_job(server: Server, http: httpx2.Client) -> None:
    cancel = threading.Event()
    threading.Timer(1.0, cancel.set).start()
    graph = GraphRecord.model_validate_json(json.dumps(chain(61))).to_graph()
    with server.client() as client, pytest.raises(remat.RematError, match="cancelled"):
        client.solve(graph, "22%", remat.Exact(), cancel=cancel)
    assert http.get("/jobs").json()["jobs"][0]["status"] == "cancelled"


# -- forms of the result --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "begins"),
    [
        ("application/json", '{"plan"'),
        ("image/svg+xml", "<svg"),
        ("text/html", "<!doctype html>"),
        ("application/vnd.chrome-trace+json", "{"),
        ("text/html;q=0.2, application/json;q=0.9", '{"plan"'),
        ("application/json;q=0, image/svg+xml;q=0.1", "<svg"),
        ("*/*", '{"plan"'),
    ],
)
def test_a_result_is_available_in_every_form(http: httpx2.Client, accept: str, begins: str) -> None:
    id = post(http, budget="65%").json()["id"]
    finished(http, id)
    response = http.get(f"/jobs/{id}/result", headers={"Accept": accept})
    assert response.status_code == 200
    assert response.text.lower().startswith(begins)


def test_generated_python_needs_a_trace(http: httpx2.Client) -> None:
    id = post(http, budget="65%").json()["id"]
    finished(http, id)
    missing = http.get(f"/jobs/{id}/result?format=python")
    assert missing.status_code == 404
    assert missing.json()["type"].endswith("no-such-format")
    assert http.get(f"/jobs/{id}/result", headers={"Accept": "text/x-python"}).status_code == 406
    for accept in ("image/png", "application/json;q=0", "*/*;q=0.0", "text/html;q=no"):
        assert http.get(f"/jobs/{id}/result", headers={"Accept": accept}).status_code == 406


@pytest.mark.slow
def test_generated_python_of_a_trace_is_available(server: Server, http: httpx2.Client) -> None:
    case = gpt2(layers=1, dropout=0.0)
    trace = remat.measure(
        remat.trace(case.model, case.args, case.kwargs), device=remat.Roofline("h200")
    )
    with server.client() as client:
        job = client.submit(SolveRequest(trace=trace, budget="80%"))
        client.finish(job.id)
    code = http.get(f"/jobs/{job.id}/result?format=python").text
    assert "def forward" in code
    assert "def backward" in code
    compile(code, "program", "exec")
    answer = SolveResult.model_validate_json(http.get(f"/jobs/{job.id}/result").content)
    program = http.get(f"/jobs/{job.id}/result?format=program").content
    assert remat.Program.from_json(program) == answer.program
    plan = http.get(f"/jobs/{job.id}/result?format=plan").content
    assert remat.Plan.from_json(plan) == answer.plan.to_plan(remat.Plan)
    with server.client() as client:
        second = client.submit(SolveRequest(trace=trace, budget="80%"))
    assert second.model == trace.model, "answers from the store have a name, too"


@pytest.mark.parametrize("form", ["svg", "schedule", "modules", "html"])
def test_html_results_cannot_run_scripts(http: httpx2.Client, form: str) -> None:
    id = post(http, budget="65%").json()["id"]
    finished(http, id)
    response = http.get(f"/jobs/{id}/result?format={form}")
    kind, begin = ("text/html", "<!doctype html>") if form == "html" else ("image/svg+xml", "<svg")
    assert response.headers["content-type"].startswith(kind)
    policy = {*response.headers["content-security-policy"].split("; ")}
    assert policy >= {"default-src 'none'", "sandbox", "style-src 'unsafe-inline'"}
    assert not any(part.startswith("script-src") for part in policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.text.lower().startswith(begin)


@pytest.mark.slow
def test_the_list_has_positions_in_the_queue(tmp_path: Path) -> None:
    with servers.running(tmp_path, "--workers", "0") as server, server.http() as http:
        ids = [post(http, budget=f"{n}%").json()["id"] for n in (60, 61, 62)]
        assert http.get("/jobs").json()["jobs"][0]["position"] == 2
        http.delete(f"/jobs/{ids[0]}")
        positions = {job["id"]: job["position"] for job in http.get("/jobs").json()["jobs"]}
        assert positions == {ids[0]: None, ids[1]: 0, ids[2]: 1}
        assert http.get(f"/jobs/{ids[2]}").json()["position"] == 1
        for state, those in (("queued", ids[:0:-1]), ("cancelled", ids[:1]), ("failed", [])):
            page = http.get("/jobs", params={"status": state}).json()
            assert [job["id"] for job in page["jobs"]] == those


# -- operation --------------------------------------------------------------------------------


def test_health_and_metrics_are_available(http: httpx2.Client) -> None:
    finished(http, post(http, budget="77%").json()["id"])
    assert http.get("/livez").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ok"}
    text = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['remat_jobs_finished_total{kind="solve",status="succeeded"}']) >= 1
    assert float(lines["remat_solve_seconds_count"]) >= 1
    assert float(lines["remat_workers"]) == 1
    assert 'remat_jobs{status="queued"}' in lines


def test_every_answer_has_an_id_and_safe_headers(http: httpx2.Client) -> None:
    with_id = http.get("/livez", headers={"X-Request-ID": "abc-1"})
    assert with_id.headers["X-Request-ID"] == "abc-1"
    with_bad_id = http.get("/nothing", headers={"X-Request-ID": "a b<script>"})
    assert with_bad_id.status_code == 404
    assert with_bad_id.headers["content-type"] == "application/problem+json"
    assert "script" not in with_bad_id.headers["X-Request-ID"]
    for answer in (
        with_bad_id,
        http.get("/"),
        http.get("/jobs"),
        http.get("/", headers={"Host": "evil"}),
    ):
        policy = answer.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {*policy}
        assert "unsafe" not in str(policy)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_requests_for_other_host_names_are_refused(http: httpx2.Client) -> None:
    answer = http.get("/jobs", headers={"Host": "evil.example:8000"})
    assert answer.status_code == 400
    assert answer.json()["type"].endswith("unknown-host")


def test_the_log_is_json_with_ids(server: Server, http: httpx2.Client) -> None:
    answer = post(http, budget="78%")
    id, request = answer.json()["id"], answer.headers["X-Request-ID"]
    finished(http, id)

    def log_lines() -> list[dict[str, str]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        return [line for line in lines if line.get("job") == id and line["event"] == "solve ended"]

    (ended,) = wait_for(log_lines)
    assert ended["request"] == request
    assert "peak_bytes" not in ended  # that of a plan has this name
    assert int(ended["process_peak_bytes"]) >= 0


# -- helpers ----------------------------------------------------------------------------------


def events(http: httpx2.Client, id: str, last: str = "0") -> Iterator[tuple[int, str, object]]:
    with http.sse(f"/jobs/{id}/events", headers={"Last-Event-ID": last}) as source:
        for event in source:
            yield int(event.id), event.event, json.loads(event.data)
