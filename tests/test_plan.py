"""`Plan`: its numbers, its words, its document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.graphs import chain

from remat.errors import DocumentError, RematError
from remat.plan import Plan, Status
from remat.schedule import Schedule
from remat.solve import solve
from remat.strategies.base import Solution


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(chain(8, size=1 << 20, cost=0.001), "60%")


def test_a_graph_without_costs_has_no_overhead() -> None:
    plan = solve(chain(8, cost=0.0), "60%")
    assert plan.overhead == 0.0
    assert plan.gap == 0.0


def test_a_bound_lies_between_the_baseline_and_the_plan(plan: Plan) -> None:
    for bound, told in ((0.0, 0.0), (plan.baseline_time_s, 0.0), (9.0, plan.overhead)):
        solution = Solution(plan.schedule, bound, "order")
        again = Plan.of(plan.graph, plan.budget_bytes, solution, {})
        assert again.lower_bound == pytest.approx(told)


def test_json_round_trip_is_the_identity(plan: Plan, tmp_path: Path) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json.gz")
    assert Plan.load(tmp_path / "plan.json.gz") == plan


def test_a_damaged_document_is_refused(plan: Plan) -> None:
    text = plan.to_json()
    with pytest.raises(DocumentError):
        Plan.from_json(text[: len(text) // 2])
    with pytest.raises(DocumentError, match="version"):
        Plan.from_json(_with(text, version=2))
    with pytest.raises(DocumentError, match="expected a"):
        Plan.from_json(_with(text, format="remat.trace"))
    with pytest.raises(DocumentError):
        Plan.from_json("[]")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peak_bytes", 1),
        ("time_s", 0.0),
        ("baseline_peak_bytes", 1),
        ("runs", [0, 1]),
        ("runs", [99]),
        ("budget_bytes", 1),
        ("budget_bytes", "1"),
        ("lower_bound", 99.0),
        ("status", "BEST"),
        ("extra", 1),
    ],
)
def test_a_forged_document_is_refused(plan: Plan, key: str, value: object) -> None:
    with pytest.raises(DocumentError):
        Plan.from_json(_with(plan.to_json(), **{key: value}))


@pytest.mark.parametrize("key", ["peak_bytes", "baseline_peak_bytes", "time_s", "baseline_time_s"])
def test_a_document_forged_by_very_little_is_refused(plan: Plan, key: str) -> None:
    told = getattr(plan, key)
    for forged in (told - 1, told + 1) if isinstance(told, int) else (told * (1 + 1e-6),):
        with pytest.raises(DocumentError, match=f"{key} is .* but its schedule gives"):
            Plan.from_json(_with(plan.to_json(), **{key: forged}))


def test_words_have_units(plan: Plan) -> None:
    text = plan.describe()
    assert str(plan) == text
    for word in ("MiB", "ms", "%", "layer.", "bound"):
        assert word in text
    assert len(repr(plan)) < 120
    assert "operations" not in repr(plan)


def test_explain_says_kept_or_recomputed(plan: Plan) -> None:
    again = plan.schedule.recomputed(plan.graph)
    assert again
    name = plan.graph.operations[next(iter(again))].name
    assert "runs 2 times" in plan.explain(name)
    assert "runs once" in plan.explain("b0")


def test_diff_names_what_changed(plan: Plan) -> None:
    other = solve(plan.graph, "100%")
    assert "recomputed 1 -> 0" in plan.diff(other)
    assert "the same operations" in plan.diff(plan)


def test_a_plan_over_its_budget_is_a_bug() -> None:
    graph = chain(3)
    with pytest.raises(RematError, match="bug"):
        Plan.of(graph, 1, Solution(Schedule.keep_all(graph)), {})


def test_status_says_what_to_do() -> None:
    assert "time_limit" in Status.FEASIBLE.value


def _with(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)
