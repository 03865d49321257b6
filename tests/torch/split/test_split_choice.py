"""The number of pieces is chosen with the plan: only where the step fits or is faster with them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.training.models import language_model
from tests.helpers.training.recorded_steps import assert_same, eager_step, relative_error, run_step

import remat
from remat.choice.candidates import Candidate, in_pieces
from remat.choice.offloadable_step import TraceStep
from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step
from remat.documents.plan import PlanDocument
from remat.errors import GraphError
from remat.heuristics.peak_bounds import end_bytes
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.limits.units import format_bytes
from remat.passes.split.splits import with_recorded_splits
from remat.plan import Plan
from remat.progress import Clock
from remat.simulate import baseline_of
from remat.strategies.base import Strategy

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=5.0)
ROWS = 64


@pytest.fixture(scope="module")
def trace() -> remat.Trace:
    case = language_model()
    return remat.measure(remat.trace(case.model, case.args), COSTS)


def choose(trace: remat.Trace, budget: str, pieces: tuple[int, ...] = PIECES) -> TracePlan:
    """Return the plan for a budget, and the trace with the splits that are chosen for it."""
    request = PlanRequest(Limits(Budget.parse(budget)), STRATEGY, pieces)
    result = plan_step(trace, request, measure=lambda split: remat.measure(split, COSTS))
    check_within_budget(result.plan, baseline_of(trace.graph()).peak_bytes, budget)
    return result


def check_within_budget(plan: Plan, baseline_bytes: int, budget: str) -> None:
    assert plan.baseline_peak_bytes == baseline_bytes
    if budget != "min":
        assert plan.peak_bytes <= float(budget.rstrip("%")) / 100 * baseline_bytes


def test_a_budget_that_is_met_without_splitting_splits_nothing(trace: remat.Trace) -> None:
    assert choose(trace, "100%").trace is trace


def test_a_budget_that_is_infeasible_without_is_met(trace: remat.Trace) -> None:
    with pytest.raises(remat.InfeasibleBudget):
        remat.solve(trace, "50%", STRATEGY)
    (split,) = choose(trace, "50%").trace.splits
    assert (split.module, split.rows) == ("head", ROWS)
    assert split.pieces in PIECES


@pytest.mark.slow
def test_the_smallest_peak_is_smaller_with_more_pieces(trace: remat.Trace) -> None:
    whole = remat.solve(trace, "min", STRATEGY)
    chosen = choose(trace, "min")
    assert chosen.plan.peak_bytes < 0.5 * whole.peak_bytes
    assert chosen.trace.splits[0].pieces > 4
    assert chosen.plan.stats["unsplit_min_bytes"] == whole.peak_bytes


def test_the_whole_step_is_planned_if_the_one_in_pieces_has_no_plan(trace: remat.Trace) -> None:
    forms: list[int] = []

    def plan_form(form: remat.Trace, budget: Budget, strategy: Strategy, _: object) -> Plan:
        forms.append(len(form.splits))
        if form.splits:
            raise remat.SolverTimeout("no time for pieces")
        return remat.solve(form, budget, strategy)

    smallest_bytes = remat.solve(trace, "min", STRATEGY).peak_bytes
    request = PlanRequest(Limits(Budget.parse(smallest_bytes)), STRATEGY, PIECES)
    measure = partial(remat.measure, device=COSTS)
    chosen = plan_step(trace, request, measure=measure, plan_form=plan_form)
    assert chosen.trace is trace
    assert forms == [1, 0]


def test_a_number_of_pieces_is_used_as_it_is(trace: remat.Trace) -> None:
    (split,) = choose(trace, "100%", (5,)).trace.splits
    assert split.pieces == 5


def test_nothing_is_split_for_a_budget_below_the_gradients(trace: remat.Trace) -> None:
    def measure(_: remat.Trace) -> remat.Trace:
        raise AssertionError("a split trace was measured")

    budget = Budget.parse(end_bytes(trace.graph()) - 1)
    with pytest.raises(remat.InfeasibleBudget) as raised:
        plan_step(trace, PlanRequest(Limits(budget), STRATEGY, PIECES), measure=measure)
    assert raised.value.is_proved
    assert "so neither was tried" in str(raised.value)


@pytest.mark.slow
def test_an_infeasible_budget_raises_the_error_of_the_smallest_pieces(trace: remat.Trace) -> None:
    with pytest.raises(remat.InfeasibleBudget) as raised:
        choose(trace, "2%")
    smallest = raised.value.min_feasible_bytes
    assert smallest is not None
    assert smallest < remat.solve(trace, "min", STRATEGY).peak_bytes


def test_an_output_that_is_summed_over_pieces_is_one_result(trace: remat.Trace) -> None:
    plan = choose(trace, "50%", (4,)).plan
    (weight,) = [p.tensor for p in trace.placeholders if p.target == "head.weight"]
    gradient = format_bytes(4 * math.prod(weight.shape))
    rows = [line for line in plan.explain("head").splitlines() if " x 4 " in line]
    backward = [line.split("retained")[1] for line in rows if "backward" in line]
    assert any(line.strip().startswith(f"(result)  {gradient} ") for line in backward)


def test_the_schedule_of_a_split_trace_is_of_no_other(trace: remat.Trace) -> None:
    split, plan = choose(trace, "50%", (4,))
    assert remat.rewrite(split, plan.schedule)
    with pytest.raises(remat.RematError, match=r"does not fit this trace .*rewrite\(step\.trace, "):
        remat.rewrite(trace, plan.schedule)


def test_recorded_splits_make_the_same_trace(trace: remat.Trace) -> None:
    """A service, and other sizes of the inputs, get the splits as data."""
    split = choose(trace, "50%").trace
    remade = remat.measure(with_recorded_splits(trace, split.splits), COSTS)
    assert remade == split
    (record,) = split.splits
    for wrong in ({"seed": "nothing"}, {"dimension_count": 3}):
        with pytest.raises(remat.RematError, match="cannot be split"):
            with_recorded_splits(trace, [record.model_copy(update=wrong)])


def test_the_plan_document_has_the_splits(trace: remat.Trace) -> None:
    plan = choose(trace, "50%").plan
    loaded = Plan.from_json(plan.to_json())
    assert loaded.graph == plan.graph
    assert loaded.graph.splits
    record = PlanDocument.of(plan)
    other = record.graph.model_copy(
        update={"unsplit": record.graph.unsplit.model_copy(update={"peak_bytes": 1})}  # type: ignore[union-attr]
    )
    with pytest.raises(remat.RematError, match="baseline_peak_bytes"):
        record.model_copy(update={"graph": other}).to_plan(Plan)


@pytest.fixture(scope="module")
def module() -> remat.RematModule:
    case = language_model()
    return remat.optimize(
        copy.deepcopy(case.model), "40%", case.args, costs=COSTS, strategy=STRATEGY
    )


def test_a_split_step_trains_as_eager_mode_within_the_budget(module: remat.RematModule) -> None:
    """With dropout and ignored labels, twice, so that the second step adds to gradients."""
    case = language_model()
    eager = eager_step(case)
    step = run_step(module, case)
    assert_same(step, eager)
    plan = module.plan
    assert plan is not None
    assert plan.graph.splits
    assert "unsplit_min_bytes" in plan.stats
    assert 0.99 * plan.peak_bytes <= step.peak_bytes <= 0.4 * plan.baseline_peak_bytes
    accumulated = run_step(module, case, zero_grad=False)
    for name, gradient in eager.gradients.items():
        total = accumulated.gradients[name]
        assert gradient is not None
        assert total is not None
        assert relative_error(2 * gradient, total) < 1e-6


def test_without_splitting_the_budget_is_an_error_that_suggests_it() -> None:
    case = language_model()
    with pytest.raises(remat.InfeasibleBudget, match='split="auto" may fit the budget'):
        remat.optimize(case.model, "40%", case.args, costs=COSTS, split="off")


@pytest.mark.slow
def test_other_sizes_reuse_the_splits(module: remat.RematModule) -> None:
    case = language_model()
    x, labels = case.args
    case.args = torch.cat([x, x]), torch.cat([labels, labels])
    step = run_step(module, case)
    assert_same(step, eager_step(case))
    plan = module.plan
    assert plan is not None
    assert [split.rows for split in plan.graph.splits] == [2 * ROWS]
    assert step.peak_bytes <= 0.4 * plan.baseline_peak_bytes


def test_a_solve_starts_from_the_quick_solve(
    trace: remat.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full solve starts from the quick solve's schedule: even with no time left, it is no
    slower, and its peak is at most 1% larger."""
    starts: list[object] = []

    def plan_form(form: remat.Trace, budget: Budget, strategy: Strategy, start: Any) -> Plan:
        starts.append(start)
        return remat.solve(form, budget, remat.Auto(time_limit=1e-3), start=start)

    for budget in ("min", "60%"):
        request = PlanRequest(Limits(Budget.parse(budget)), STRATEGY, PIECES)
        measure = partial(remat.measure, device=COSTS)
        chosen = plan_step(trace, request, measure=measure, plan_form=plan_form)
        estimate = remat.solve(chosen.trace.graph(), budget, remat.Auto(gap=0.99, peak_gap=0.99))
        assert chosen.plan.split
        assert starts.pop() == estimate.schedule
        assert chosen.plan.peak_bytes <= 1.01 * estimate.peak_bytes
        assert chosen.plan.time_s <= estimate.time_s


def test_a_start_of_another_graph_is_refused(trace: remat.Trace) -> None:
    other = remat.Schedule((0, 1))
    with pytest.raises(
        GraphError, match="never runs; pass the schedule of a plan of the same graph"
    ):
        remat.solve(trace, "60%", STRATEGY, start=other)
    plan: Any = remat.solve(trace, "100%", STRATEGY)
    for wrong in (plan, list(plan.schedule.runs), False):
        with pytest.raises(TypeError, match=r"pass `plan\.schedule`"):
            remat.solve(trace, "60%", STRATEGY, start=wrong)


@pytest.mark.parametrize(
    ("unsplit", "candidates", "tried"),
    [
        (0.5, {16: (0.6, 0.55), 8: (0.3, 0.2), 4: (0.4, 0.3), 2: (0.7, 0.6)}, [16, 2]),
        (0.5, {16: (0.6, 0.55), 8: (0.3, 0.2), 4: (0.4, 0.3), 2: (0.7, 0.4)}, [16, 2, 4, 8]),
        (0.5, {16: (0.6, 0.4), 8: (0.3, 0.2), 4: (0.4, 0.3), 2: (0.7, 0.4)}, [16, 8, 4, 2]),
        (0.05, {2: (0.06, 0.04), 4: (0.01, 0.0), 8: (0.0, 0.0), 16: (0.0, 0.0)}, [2, 4, 8, 16]),
        (0.05, {2: (0.06, 0.055), 4: (0.01, 0.0), 8: (0.0, 0.0), 16: (0.0, 0.0)}, [2]),
        (0.05, {2: None, 4: (0.01, 0.0), 8: (0.0, 0.0), 16: (0.0, 0.0)}, [2, 4, 8, 16]),
        (None, {16: None, 8: (0.3, 0.2), 4: (0.4, 0.3), 2: None}, [16, 8, 4, 2]),
    ],
)
def test_numbers_that_are_proved_to_be_slower_end_the_search(
    unsplit: float | None,
    candidates: dict[int, tuple[float, float] | None],
    tried: list[int],
    trace: remat.Trace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each candidate is its extra time and its bound, None if no schedule is found."""
    plan = remat.solve(trace, "100%", STRATEGY)

    def candidate(figures: tuple[float, float] | None) -> Candidate:
        if figures is None:
            return Candidate(TraceStep(trace), None)
        time_s = (1 + figures[0]) * plan.baseline_time_s
        return Candidate(TraceStep(trace), replace(plan, time_s=time_s, lower_bound=figures[1]))

    numbers: list[int] = []

    def in_number(_: object, number: int, __: float) -> Candidate:
        numbers.append(number)
        return candidate(candidates[number])

    monkeypatch.setattr("remat.choice.candidates._candidate_in_pieces", in_number)
    search: Any = SimpleNamespace(
        request=PlanRequest(Limits(Budget.parse("50%")), STRATEGY, PIECES),
        clock=Clock.of(math.inf),
        is_min=False,
        as_it_is=candidate(None if unsplit is None else (unsplit, 0.0)),
    )
    assert len([*in_pieces(search)]) == len(tried)
    assert numbers == tried
