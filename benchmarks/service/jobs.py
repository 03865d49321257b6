"""Jobs whose answers are known beforehand, and what must be true of them in the end."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from tests.helpers.server import chain

import remat
from remat.documents.plan import GraphRecord

BUDGET = "60%"
LENGTH = 14


def body(number: int) -> dict[str, Any]:
    """A request unlike any other: the same chain, in another size."""
    return {"graph": chain(LENGTH, size=1000 + number), "budget": BUDGET}


def expected_plan() -> remat.Plan:
    """What every one of them must come to: sizes in proportion change no schedule."""
    graph = GraphRecord.model_validate_json(json.dumps(chain(LENGTH, size=1000))).graph()
    return remat.solve(graph, BUDGET)


def check(http: httpx2.Client, id: str, plan: remat.Plan) -> None:
    """Assert that the job is done, once, with the right answer."""
    job = http.get(f"/jobs/{id}").json()
    assert job["status"] == "succeeded", job
    (summary,) = job["summary"]
    assert abs(summary["overhead"] - plan.overhead) < 1e-9, (summary, plan)
    assert summary["peak_bytes"] <= summary["budget_bytes"]
    with http.sse(f"/jobs/{id}/events") as source:
        story = [(event.event, json.loads(event.data)) for event in source]
    ends = [data for kind, data in story if kind == "done"]
    assert ends == [{"status": "succeeded"}], story
    succeeded = [data for kind, data in story if kind == "status" and data in ends]
    assert len(succeeded) == 1, story
