"""Jobs with known results, and the assertions about their end."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from tests.helpers.service.server import chain

import remat
from remat.documents.plan import GraphRecord

BUDGET = "60%"
LENGTH = 14


def request_body(number: int) -> dict[str, Any]:
    """Return a request that differs for each number: the same chain with other sizes."""
    return {"graph": chain(LENGTH, size=1000 + number), "budget": BUDGET}


def expected_plan() -> remat.Plan:
    """Return the plan that all requests must have: proportional sizes have the same schedule."""
    graph = GraphRecord.model_validate_json(json.dumps(chain(LENGTH, size=1000))).to_graph()
    return remat.solve(graph, BUDGET)


def assert_succeeded_once(http: httpx2.Client, id: str, plan: remat.Plan) -> None:
    """Assert that a job has succeeded exactly once, with the overhead of `plan`."""
    job = http.get(f"/jobs/{id}").json()
    assert job["status"] == "succeeded", job
    (summary,) = job["summary"]
    assert abs(summary["overhead"] - plan.overhead) < 1e-9, (summary, plan)
    assert summary["peak_bytes"] <= summary["budget_bytes"]
    with http.sse(f"/jobs/{id}/events") as source:
        events = [(event.event, json.loads(event.data)) for event in source]
    ends = [data for kind, data in events if kind == "done"]
    assert ends == [{"status": "succeeded"}], events
    succeeded = [data for kind, data in events if kind == "status" and data in ends]
    assert len(succeeded) == 1, events
