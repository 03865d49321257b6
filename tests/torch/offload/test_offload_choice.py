"""The choice of tensors to offload: never slower than without, within both budgets."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.torch.offload.test_offload_tensors import (
    FAST,
    SMALL_BYTES,
    measured,
    net_case,
    run,
)

import remat
from remat.costs.link import Link
from remat.documents.trace import Trace
from remat.offload_choice import OffloadedPlan, solve_with_offload
from remat.plan import Plan


@pytest.fixture(scope="module")
def trace() -> Trace:
    return measured(net_case())


def solver(budget: int | str) -> Callable[[Trace], Plan]:
    return lambda trace: remat.solve(trace, budget, remat.Auto(time_limit=3))


def choose(trace: Trace, budget: int | str, link: Link, **options: int) -> OffloadedPlan:
    return solve_with_offload(trace, link, solver(budget), min_bytes=SMALL_BYTES, **options)


@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_a_fast_link_is_cheaper_than_recomputation(trace: Trace, budget: str) -> None:
    without = remat.solve(trace, budget, remat.Auto(time_limit=3))
    chosen = choose(trace, budget, FAST)
    assert without.overhead > 0
    assert chosen.offloaded
    assert chosen.times.step_s < without.time_s
    assert chosen.plan.peak_bytes <= without.budget_bytes
    assert chosen.plan.budget_bytes == without.budget_bytes, "percentages are of the same peak"


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_nothing_is_offloaded_where_it_does_not_pay(trace: Trace, budget: str) -> None:
    slow = Link(1e6, 1e6) if budget == "70%" else FAST
    chosen = choose(trace, budget, slow)
    assert chosen.offloaded == ()
    assert chosen.trace is trace
    assert chosen.times.step_s == pytest.approx(
        remat.solve(trace, budget, remat.Auto(time_limit=3)).time_s
    )


def test_the_host_has_a_budget(trace: Trace) -> None:
    full = choose(trace, "60%", FAST)
    half_bytes = full.times.host_bytes // 2
    half = choose(trace, "60%", FAST, host_budget_bytes=half_bytes)
    assert 0 < half.times.host_bytes <= half_bytes
    assert full.times.step_s <= half.times.step_s
    assert choose(trace, "60%", FAST, host_budget_bytes=0).offloaded == ()


def test_an_infeasible_budget_is_that_of_the_step_without_copies(trace: Trace) -> None:
    smallest = remat.solve(trace, "min", remat.Auto(time_limit=3)).peak_bytes
    with pytest.raises(remat.InfeasibleBudget) as chosen:
        choose(trace, smallest // 2, FAST)
    with pytest.raises(remat.InfeasibleBudget) as without:
        solver(smallest // 2)(trace)
    assert chosen.value.min_feasible_bytes == without.value.min_feasible_bytes


def test_the_chosen_plan_runs_with_eager_modes_numbers() -> None:
    case = net_case()
    reference = copy.deepcopy(case.model)
    chosen = choose(measured(case), "60%", FAST)
    assert chosen.offloaded
    module = remat.lower(remat.rewrite(chosen.trace, chosen.plan.schedule), case.model)
    assert torch.equal(run(reference, case), run(module, case))
    for p, q in zip(reference.parameters(), case.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
