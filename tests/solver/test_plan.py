"""`Plan`: its numbers, its description, its document."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from tests.helpers.graphs import chain
from tests.helpers.plans import plan_of

from remat.documents.plan import CandidateRecord, GraphRecord, OperationRecord
from remat.errors import DocumentError, RematError
from remat.plan import Plan, Status
from remat.plan_data import (
    PLAN_PARTS,
    AllocatorPrediction,
    CandidateResult,
    DeclinedOptions,
    OffloadFigures,
    PlanTerms,
    SplitFigures,
    with_reserve,
)
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import BoundScope, Solution
from remat.solve import solve


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(chain(8, size=1 << 20, cost=0.001), "60%")


@pytest.fixture(scope="module")
def plan_keeping_all() -> Plan:
    """A plan that uses its whole budget and whose bound is its time."""
    graph = chain(3)
    schedule = Schedule.keep_all(graph)
    solution = Solution(schedule, graph.total_cost_s, "all orders", True)
    return Plan.of(graph, simulate(graph, schedule).peak_bytes, solution, {"solver": "none"})


def test_a_plan_is_immutable(plan_keeping_all: Plan) -> None:
    """Nor can attributes be added."""
    for name in ("peak_bytes", "comment"):
        with pytest.raises(FrozenInstanceError):
            setattr(plan_keeping_all, name, 0)
    same = Plan.from_json(plan_keeping_all.to_json())
    assert len({plan_keeping_all, same}) == 1, "so it can be a key"


def test_a_plan_may_use_its_whole_budget_and_have_no_gap(plan_keeping_all: Plan) -> None:
    assert plan_keeping_all.peak_bytes == plan_keeping_all.budget_bytes
    assert plan_keeping_all.lower_bound == plan_keeping_all.overhead == plan_keeping_all.gap == 0.0
    assert Plan.from_json(plan_keeping_all.to_json()) == plan_keeping_all


@pytest.mark.parametrize(
    ("scope", "proved", "status"),
    [
        ("slots", True, "FEASIBLE"),
        ("slots", False, "FEASIBLE"),
        ("order", True, "OPTIMAL"),
        ("order", False, "FEASIBLE"),
        ("all orders", True, "OPTIMAL"),
        ("all orders", False, "FEASIBLE"),
    ],
)
def test_a_proof_for_the_order_makes_a_plan_optimal(
    plan_keeping_all: Plan, scope: BoundScope, proved: bool, status: str
) -> None:
    """Also in documents: some older ones call a plan optimal by a proof over slots."""
    solution = Solution(plan_keeping_all.schedule, plan_keeping_all.baseline_time_s, scope, proved)
    plan = Plan.of(plan_keeping_all.graph, plan_keeping_all.budget_bytes, solution, {})
    assert plan.status.name == status
    claimed = _with(plan.to_json(), status="OPTIMAL" if proved else "FEASIBLE")
    assert Plan.from_json(claimed) == plan


def test_a_plan_without_a_bound_has_no_gap(plan_keeping_all: Plan) -> None:
    plan = plan_of(plan_keeping_all.graph, plan_keeping_all.schedule)
    assert plan.lower_bound is None
    assert plan.gap is None
    assert Plan.from_json(plan.to_json()) == plan


def test_overhead_and_gap_are_fractions_of_time() -> None:
    """Also of overheads above 1: each activation runs four times more."""
    graph = chain(4)
    schedule = Schedule.of([*range(4), *([*range(1, 4)] * 4), *range(4, 8)])
    solution = Solution(schedule, 11.0, "order")
    plan = Plan.of(graph, simulate(graph, schedule).peak_bytes, solution, {})
    assert (plan.baseline_time_s, plan.time_s) == (8.0, 20.0)
    assert plan.overhead == pytest.approx(12 / 8)
    assert plan.lower_bound == pytest.approx(3 / 8)
    assert plan.gap == pytest.approx((20 - 11) / 20)


@pytest.mark.parametrize(("cost_s", "overhead"), [(1e-3, 1 / 8), (0.0, 0.0)])
def test_short_steps_have_an_overhead(cost_s: float, overhead: float) -> None:
    plan = plan_of(chain(4, cost=cost_s), Schedule.of([*range(4), 1, *range(4, 8)]))
    assert plan.overhead == pytest.approx(overhead)


def test_a_bound_lies_between_the_baseline_and_the_plan(plan: Plan) -> None:
    for bound, reported_bound in ((0.0, 0.0), (plan.baseline_time_s, 0.0), (9.0, plan.overhead)):
        solution = Solution(plan.schedule, bound, "order")
        bounded_plan = Plan.of(plan.graph, plan.budget_bytes, solution, {})
        assert bounded_plan.lower_bound == pytest.approx(reported_bound)


ALL_PARTS = {
    "terms": PlanTerms("measured", 0.005, 3000, 100, 0.5, cuda_graphs=True),
    "split": SplitFigures(0.25, 2000),
    "offload": OffloadFigures(100, 6.0, 4.0, 50.0, 25.0),
    "declined": DeclinedOptions("lm_head: no loss", "the host budget is 0"),
    "allocator": AllocatorPrediction(1, 2, 3, 4, 5),
}


def test_a_plan_is_read_with_all_its_parts(plan: Plan, tmp_path: Path) -> None:
    assert ALL_PARTS.keys() == PLAN_PARTS.keys()
    full = replace(plan, **ALL_PARTS)
    assert Plan.from_json(full.to_json()) == full
    assert Plan.from_json(full.to_json()).to_json() == full.to_json()
    full.save(tmp_path / "plan.json.gz")
    assert Plan.load(tmp_path / "plan.json.gz") == full
    assert set(full.stats) - set(plan.solve) == {
        field.name for kind in PLAN_PARTS.values() for field in fields(kind)
    }
    assert full.stats["requested_budget_bytes"] == 3000
    assert full.stats["cuda_graphs"] is True
    with pytest.raises(TypeError):
        full.stats["host_bytes"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    "part", [*ALL_PARTS.values(), CandidateResult("split", "taken")], ids=lambda p: type(p).__name__
)
def test_the_parts_of_a_plan_are_immutable(part: object) -> None:
    for part_field in fields(part):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(part, part_field.name, None)


def test_host_memory_is_in_use_only_where_tensors_are_offloaded(plan: Plan) -> None:
    assert plan.host_bytes == 0
    assert replace(plan, offload=ALL_PARTS["offload"]).host_bytes == 100


def test_each_kind_of_segments_has_its_own_peaks() -> None:
    prediction = AllocatorPrediction(1, 2, 3, 4, 5)
    for is_expandable, peaks in ((False, (2, 3)), (True, (4, 5))):
        assert prediction.allocated(is_expandable=is_expandable) == peaks[0]
        assert prediction.reserved(is_expandable=is_expandable) == peaks[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("to_host_bytes_per_s", rate) for rate in ("fast", 0.0, -1.0)),
        ("waiting_s", None),
        ("allocated_peak_bytes", "many"),
    ],
)
def test_a_part_with_a_wrong_figure_is_refused(plan: Plan, key: str, value: object) -> None:
    document = json.loads(replace(plan, **ALL_PARTS).to_json())
    del document["stats"][key]
    with pytest.raises(DocumentError, match="stats"):
        Plan.from_json(json.dumps(document))
    document["stats"][key] = value
    with pytest.raises(DocumentError, match="stats"):
        Plan.from_json(json.dumps(document))


def test_a_damaged_document_is_refused(plan: Plan) -> None:
    text = plan.to_json()
    with pytest.raises(DocumentError):
        Plan.from_json(text[: len(text) // 2])
    with pytest.raises(DocumentError, match="version 1, this remat reads version 2"):
        Plan.from_json(_with(text, version=1))
    with pytest.raises(DocumentError, match="expected a"):
        Plan.from_json(_with(text, format="remat.trace"))
    with pytest.raises(DocumentError):
        Plan.from_json("[]")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_bytes": 1}, "its schedule gives"),
        ({"time_s": 0.0}, "its schedule gives"),
        ({"baseline_peak_bytes": 1}, "its schedule gives"),
        ({"runs": [0, 1]}, "remat.plan: "),
        ({"runs": [99]}, "remat.plan: "),
        ({"budget_bytes": 1}, "over the budget"),
        ({"budget_bytes": "1"}, "integer"),
        ({"lower_bound": 99.0}, "over the overhead"),
        ({"status": "BEST"}, "OPTIMAL"),
        ({"extra": 1}, "Extra inputs"),
        ({"status": "OPTIMAL", "lower_bound": None}, "OPTIMAL, but there is no lower_bound"),
        ({"budget_bytes": -1}, "budget_bytes.* greater than or equal to 0"),
        ({"baseline_peak_bytes": -1}, "baseline_peak_bytes.* greater than or equal to 0"),
        ({"time_s": -0.5}, "time_s.* greater than or equal to 0"),
        ({"runs": [-1]}, "runs.* greater than or equal to 0"),
        # A bound is negative where pieces of a split operation are faster than the operation.
        ({"lower_bound": -1.5}, "lower_bound.* greater than or equal to -1"),
    ],
)
def test_a_forged_document_is_refused(plan: Plan, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        Plan.from_json(_with(plan.to_json(), **changes))


def test_optional_fields_of_a_document_may_be_missing(plan: Plan) -> None:
    """They are left out of older documents, and then have no effect."""
    plan = replace(plan, candidates=(CandidateResult("whole", "taken"),))
    document = json.loads(plan.to_json())
    assert document["version"] == 2
    records = [
        *((operation, OperationRecord) for operation in document["graph"]["operations"]),
        *((candidate, CandidateRecord) for candidate in document["candidates"]),
        (document["graph"], GraphRecord),
    ]
    for record, kind in records:
        for name, record_field in kind.model_fields.items():
            if not record_field.is_required():
                del record[name]
    assert Plan.from_json(json.dumps(document)) == plan
    del document["candidates"]
    assert Plan.from_json(json.dumps(document)) == replace(plan, candidates=())


@pytest.mark.parametrize("key", ["peak_bytes", "baseline_peak_bytes", "time_s", "baseline_time_s"])
def test_a_document_with_a_slightly_wrong_number_is_refused(plan: Plan, key: str) -> None:
    value = getattr(plan, key)
    for forged in (value - 1, value + 1) if isinstance(value, int) else (value * (1 + 1e-6),):
        with pytest.raises(DocumentError, match=f"{key} is .* but its schedule gives"):
            Plan.from_json(_with(plan.to_json(), **{key: forged}))


def test_the_description_has_units(plan: Plan) -> None:
    text = plan.describe()
    assert str(plan) == text == str(plan.report())
    assert text != str(plan.report(solve=True)) == plan.describe(solve=True)
    for word in ("MiB", "ms", "%", "layer.", "bound"):
        assert word in text
    assert len(repr(plan)) < 120
    assert "operations" not in repr(plan)


def test_recomputations_are_described(plan: Plan, plan_keeping_all: Plan) -> None:
    graph = plan.graph
    count = len(plan.schedule.recomputed(graph))
    assert f"recompute {count} of 16 operations, once each\n" in plan.describe()
    schedule = Schedule((*range(7), 0, 0, *range(7, 16)))
    twice = Plan.of(graph, 10**9, Solution(schedule), {})
    assert "recompute 1 of 16 operations, 2 times in all\n" in twice.describe()
    assert "recompute 0 of 6 operations\n" in f"{plan_keeping_all.describe()}\n"


def test_the_reserve_is_described_and_the_searchs_margin_is_not(plan: Plan) -> None:
    assert "reserved" not in replace(plan, solve={"reserve_bytes": 1024}).describe()
    assert "plus 1.00 KiB reserved" in with_reserve(plan, 1024).describe()
    assert with_reserve(plan, 0) == plan


def test_explain_says_whether_an_operation_is_retained_or_recomputed(plan: Plan) -> None:
    recomputed = plan.schedule.recomputed(plan.graph)
    assert recomputed
    name = plan.graph.operations[next(iter(recomputed))].name
    assert "runs 2 times" in plan.explain(name)
    assert "runs once" in plan.explain("b0")


def test_diff_names_the_changed_operations(plan: Plan) -> None:
    other = solve(plan.graph, "100%")
    assert "recomputed 1 -> 0" in plan.diff(other)
    assert "the same operations" in plan.diff(plan)


def test_a_plan_over_its_budget_raises_an_error() -> None:
    graph = chain(3)
    with pytest.raises(RematError, match="bug"):
        Plan.of(graph, 1, Solution(Schedule.keep_all(graph)), {})


def test_the_status_says_what_is_proved() -> None:
    """It gives no advice: whether more time would help is unknown."""
    assert "not proved" in Status.FEASIBLE.value
    assert "time_limit" not in Status.FEASIBLE.value


def _with(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)
