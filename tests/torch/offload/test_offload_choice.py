"""The choice of tensors to offload: never slower than without, within both budgets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.helpers.training.models import Case
from tests.helpers.training.offloaded_steps import (
    FAST,
    SMALL_BYTES,
    assert_eager_numbers,
    measured,
    net_case,
)
from torch import nn

import remat
from remat.choice.offload_search import offloaded_forms
from remat.choice.offloadable_step import TraceStep
from remat.choice.offloaded_forms import OffloadLimits, form_with_everything_offloaded
from remat.choice.offloaded_plans import is_within_reach_of_eviction
from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step, sweep_with_offload
from remat.costs.devices import Link
from remat.documents.targets import OFFLOAD_TARGET
from remat.documents.trace import Trace
from remat.heuristics.peak_bounds import end_bytes, peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.passes.offload.copies import copy_times
from remat.plan import Plan
from remat.progress import Clock
from remat.solve import sweep
from remat.strategies.base import Strategy

SLOWEST = Link(1e6, 1e6)
STRATEGY = remat.Auto(time_limit=3)
UNLIMITED = Clock.of(math.inf)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return measured(net_case())


plans: dict[tuple[str, Budget], Plan] = {}


def solved(
    trace: Trace, budget: int | str | Budget, strategy: Strategy = STRATEGY, _: object = None
) -> Plan:
    """Return the same plan for the same trace and budget: where the time limit ends the search, a
    second one could find another plan."""
    key = (trace.model_dump_json(), Budget.parse(budget))
    if key not in plans:
        plans[key] = remat.solve(trace, budget, strategy)
    return plans[key]


def choose(
    trace: Trace,
    budget: int | str,
    link: Link,
    host_bytes: int | None = None,
    plan_without: Callable[[], TracePlan] | None = None,
) -> TracePlan:
    return plan_step(
        trace,
        PlanRequest(
            Limits(Budget.parse(budget)),
            STRATEGY,
            offload=OffloadLimits(link, host_bytes, SMALL_BYTES),
        ),
        measure=lambda split: split,
        plan_form=solved,
        plan_without=plan_without,
        clock=UNLIMITED,
    )


def offloaded_tensors(trace: Trace) -> list[str]:
    return [n.operand_names[0] for n in trace.nodes if n.target == OFFLOAD_TARGET]


@pytest.mark.parametrize("budget", ["80%", pytest.param("60%", marks=pytest.mark.slow)])
def test_a_fast_link_is_cheaper_than_recomputation(trace: Trace, budget: str) -> None:
    without = solved(trace, budget)
    chosen = choose(trace, budget, FAST)
    assert without.overhead > 0
    assert offloaded_tensors(chosen.trace)
    assert chosen.plan.time_s < without.time_s
    assert chosen.plan.peak_bytes <= without.budget_bytes
    assert chosen.plan.budget_bytes == without.budget_bytes, "percentages are of the same peak"
    assert chosen.plan.lower_bound is not None
    assert chosen.plan.lower_bound <= chosen.plan.overhead


@pytest.mark.slow_cases("70%")
@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_nothing_is_offloaded_where_it_does_not_pay(trace: Trace, budget: str) -> None:
    chosen = choose(trace, budget, SLOWEST if budget == "70%" else FAST)
    assert chosen.trace is trace
    reasons = {"100%": "the step fits the budget without", "70%": "no plan with offloading is"}
    assert f"offload   nothing is offloaded: {reasons[budget]}" in chosen.plan.describe()
    assert chosen.plan.time_s == pytest.approx(solved(trace, budget).time_s)


@pytest.mark.parametrize("link", [FAST, Link(3e9, 2e9)], ids=["fast", "slow"])
def test_the_time_of_a_plan_includes_waiting_for_copies(trace: Trace, link: Link) -> None:
    chosen = choose(trace, "70%", link)
    assert offloaded_tensors(chosen.trace)
    free = chosen.trace.replace(
        nodes=tuple(
            n.model_copy(update={"cost_s": 0.0}) if n.cost_source == "link" else n
            for n in chosen.trace.nodes
        )
    )
    times = copy_times(free.graph(), chosen.plan.schedule.runs, link)
    assert chosen.plan.time_s == pytest.approx(times.step_s)
    assert chosen.plan.stats["waiting_s"] == pytest.approx(times.waiting_s)
    assert chosen.plan.host_bytes == times.largest_host_bytes


def test_the_host_has_a_budget(trace: Trace) -> None:
    full = choose(trace, "75%", FAST)
    half_bytes = full.plan.host_bytes // 2
    half = choose(trace, "75%", FAST, half_bytes)
    assert 0 < half.plan.host_bytes <= half_bytes
    assert full.plan.time_s <= half.plan.time_s
    none = choose(trace, "75%", FAST, 0)
    assert none.trace is trace
    assert "offload   nothing is offloaded: the host budget is 0" in none.plan.describe()


@pytest.mark.slow
def test_the_smallest_peak_does_not_take_more_time(trace: Trace) -> None:
    smallest = solved(trace, "min")
    chosen = choose(trace, "min", FAST)
    assert chosen.plan.peak_bytes <= smallest.peak_bytes
    assert chosen.plan.overhead <= smallest.overhead + 1e-9


@pytest.mark.slow
def test_the_host_has_a_budget_for_the_smallest_peak(trace: Trace) -> None:
    full = choose(trace, "min", FAST)
    half_bytes = full.plan.host_bytes // 2
    half = choose(trace, "min", FAST, half_bytes)
    assert 0 < half.plan.host_bytes <= half_bytes


def test_the_smallest_peak_without_offloading_is_not_searched_where_it_cannot_be_faster(
    trace: Trace,
) -> None:
    def plan_without() -> TracePlan:
        raise AssertionError("solved without offloading")

    chosen = choose(trace, "min", FAST, plan_without=plan_without)
    assert chosen.plan.overhead < 0.001
    assert chosen.plan.peak_bytes <= 1.01 * peak_lower_bound_bytes(trace.graph())


def test_everything_offloaded_takes_less_memory_where_copies_overlap_with_nothing(
    trace: Trace,
) -> None:
    limits = OffloadLimits(FAST, None, SMALL_BYTES)

    def smallest_bytes(overlaps: bool) -> int:
        form = form_with_everything_offloaded(TraceStep(trace), limits, overlaps=overlaps)
        return peak_lower_bound_bytes(form.step().graph())

    assert smallest_bytes(False) < smallest_bytes(True)


def test_a_budget_is_within_reach_if_a_schedule_fits(trace: Trace) -> None:
    graph = trace.graph()
    smallest = solved(trace, "min").peak_bytes
    assert is_within_reach_of_eviction(graph, smallest)
    assert not is_within_reach_of_eviction(graph, peak_lower_bound_bytes(graph) - 1)


class Skip(nn.Module):
    """A large tensor skips layers of small ones, and so does its gradient."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.deep = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sin()
        deep = self.deep(h.view(8, -1, 32).mean(0))
        return self.last(h + deep.repeat(8, 1)).square().mean()


def skip_case(model: Skip, rows: int) -> tuple[Case, Trace]:
    """Return a step, and its trace without recomputation of gradients."""
    torch.manual_seed(0)
    case = Case(model, (torch.randn(rows, 32),), loss=lambda loss: loss)
    trace = measured(case)
    nodes = (n.model_copy(update={"recomputable": not n.backward}) for n in trace.nodes)
    return case, trace.replace(nodes=tuple(nodes))


def test_a_smallest_peak_that_takes_long_has_to_save_one_percent() -> None:
    """Everything on the host takes 0.7% less memory, and three times the time."""
    _, trace = skip_case(Skip(4096), 128)
    link = Link(1e9, 1e9)
    smallest = solved(trace, "min")
    assert choose(trace, "min", link).trace is trace
    below = choose(trace, smallest.peak_bytes - 1, link).plan
    assert 0.99 * smallest.peak_bytes < below.peak_bytes < smallest.peak_bytes
    assert below.overhead > 1.0


@pytest.mark.slow
def test_the_gradient_of_a_skip_connection_is_offloaded_for_the_smallest_peak() -> None:
    case, trace = skip_case(Skip(), 1024)
    smallest = solved(trace, "min")
    chosen = choose(trace, "min", FAST)
    is_backward = {n.results[0].name: n.backward for n in trace.nodes if n.results}
    assert any(is_backward[name] for name in offloaded_tensors(chosen.trace))
    assert chosen.plan.peak_bytes < smallest.peak_bytes
    between = (chosen.plan.peak_bytes + smallest.peak_bytes) // 2
    with pytest.raises(remat.InfeasibleBudget):
        solved(trace, between)
    assert choose(trace, between, FAST).plan.peak_bytes <= between
    assert_eager_numbers(chosen.trace, case, chosen.plan.schedule)


@pytest.mark.slow
def test_an_infeasible_budget_is_that_of_the_step_without_copies(trace: Trace) -> None:
    smallest = solved(trace, "min").peak_bytes
    with pytest.raises(remat.InfeasibleBudget) as chosen:
        choose(trace, smallest // 3, FAST)
    with pytest.raises(remat.InfeasibleBudget) as without:
        solved(trace, smallest // 3)
    assert chosen.value.min_feasible_bytes == without.value.min_feasible_bytes
    with pytest.raises(remat.InfeasibleBudget, match='"min" takes the smallest peak with it'):
        choose(trace, end_bytes(trace.graph()) + 1, FAST)


def test_the_search_ends_with_a_trace_that_is_as_fast_as_the_bound(trace: Trace) -> None:
    graph = trace.graph()
    budget_bytes = round(0.85 * remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes)
    limits = OffloadLimits(Link(1e15, 1e15), None, SMALL_BYTES)
    choices = offloaded_forms([TraceStep(trace)], budget_bytes, limits, UNLIMITED)
    assert len(choices) == 1
    (choice,) = choices
    assert choice.without_recompute_s <= choice.bound_s * 1.001
    assert choice.score_s >= choice.bound_s * (1 - 1e-9)


def test_nothing_is_tried_where_one_operation_does_not_fit(trace: Trace) -> None:
    limits = OffloadLimits(FAST, None, SMALL_BYTES)
    smallest = solved(trace, "min").peak_bytes
    assert offloaded_forms([TraceStep(trace)], smallest, limits, UNLIMITED)
    assert offloaded_forms([TraceStep(trace)], smallest // 3, limits, UNLIMITED) == []


@pytest.mark.slow
def test_the_chosen_plan_runs_with_eager_modes_numbers() -> None:
    case = net_case()
    chosen = choose(measured(case), "60%", FAST)
    assert offloaded_tensors(chosen.trace)
    assert_eager_numbers(chosen.trace, case, chosen.plan.schedule)


def test_a_sweep_on_cuda_has_one_plan_for_each_budget_never_slower_than_without_offloading() -> (
    None
):
    """torch's allocator lowers the budget of such a plan, which stays the plan for the requested
    one."""
    trace = measured(net_case(layers=3, rows=40009), "h100")
    strategy = remat.Auto(time_limit=2)
    (without,) = sweep(trace, ["60%"], strategy)
    assert without.budget_bytes < without.requested_budget_bytes, "else there is nothing to test"
    limits = OffloadLimits(Link(1e9, 1e9), None)
    (plan,) = sweep_with_offload(
        trace, [Budget.parse("60%")], strategy, limits, [without], on_plan=lambda: None
    )
    assert plan.requested_budget_bytes == without.requested_budget_bytes
    assert plan.time_s <= without.time_s
