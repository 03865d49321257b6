"""Laws 1 to 3 of the architecture on real model families: same function, never above the budget,
predicted peak = measured peak."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.training.models import FAMILIES, Case, WithParts
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn
from torch.nn import functional

import remat
from remat.heuristics.annealing.orders import first_run_order

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(gap=0.02, time_limit=5.0)


QUICK = {("gpt2", "75%"), ("resnet", "min")}
CASES = [
    pytest.param(family, budget, marks=[] if (family, budget) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for budget in ("75%", "min")
]


@pytest.mark.slow_cases("gpt2-75%")
@pytest.mark.parametrize(("family", "budget"), CASES)
def test_every_family_trains_as_eager_mode_within_the_budget(family: str, budget: str) -> None:
    torch.manual_seed(0)
    case = FAMILIES[family]()
    eager = eager_step(case)
    model = copy.deepcopy(case.model)
    limit: int | str = int(0.75 * eager.peak_bytes) if budget == "75%" else "min"
    try:
        gm = remat.optimize(model, limit, case.args, case.kwargs, costs=COSTS, strategy=STRATEGY)
    except remat.InfeasibleBudget as error:
        # Parameters dominate: use the smallest feasible budget, which the message names.
        limit = error.min_feasible_bytes or 0
        gm = remat.optimize(model, limit, case.args, case.kwargs, costs=COSTS, strategy=STRATEGY)
    step = run_step(gm, case)
    assert_same(step, eager)
    plan, program = gm.plan, gm.program
    assert plan is not None
    assert program is not None
    predicted = program.predicted_peak_bytes
    assert plan.peak_bytes == predicted
    if limit != "min":
        assert step.peak_bytes <= limit
    assert step.peak_bytes <= predicted
    assert step.peak_bytes >= 0.99 * predicted
    assert plan.peak_bytes < eager.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("resnet", "unet"))]
)
def test_a_plan_in_another_order_computes_the_same(family: str) -> None:
    """Dropout, batch norm and skip connections, in an order that the search selects."""
    torch.manual_seed(0)
    case = FAMILIES[family]()
    eager = eager_step(case)
    strategy = remat.Auto(gap=0.02, time_limit=3.0, order="on")
    gm = remat.optimize(
        copy.deepcopy(case.model), "85%", case.args, case.kwargs, costs=COSTS, strategy=strategy
    )
    step = run_step(gm, case)
    assert_same(step, eager)
    assert gm.plan is not None
    assert step.peak_bytes <= gm.plan.peak_bytes <= gm.plan.budget_bytes
    assert first_run_order(gm.plan.schedule) != tuple(range(len(gm.plan.graph)))


class Branches(WithParts, scale=lambda: nn.Parameter(torch.ones(8, 1))):
    """Two independent dropouts; running the second first needs less memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped_out = functional.dropout(self.scale * x.repeat(1, 64), 0.5)
        brief = functional.dropout(self.scale * x.repeat(1, 128), 0.5).mean(1, keepdim=True)
        return (dropped_out * brief).square().mean()


@pytest.mark.slow_cases("70%")
@pytest.mark.parametrize("budget", ["90%", "70%"])
def test_random_operations_keep_their_order(budget: str) -> None:
    torch.manual_seed(0)
    case = Case(Branches(), (torch.randn(8, 16),), loss=lambda out: out)
    strategy = remat.Auto(time_limit=3.0, order="on")
    gm = remat.optimize(
        copy.deepcopy(case.model), budget, case.args, costs=COSTS, strategy=strategy
    )
    assert_same(run_step(gm, case), eager_step(case), tolerance=0.0)
    assert gm.plan is not None
    assert not gm.plan.schedule.keeps_order(), "the premise: another order is better"
