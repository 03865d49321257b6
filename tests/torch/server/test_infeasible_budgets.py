"""The option `infeasible` of the service: "smallest" solves for the smallest peak in place of an
error, and the client issues the warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from tests.helpers.service.server import Server, chain, post
from tests.torch.laws.test_infeasible import COSTS, STRATEGY, Outcome, batch, net, ran, traced

import remat
from remat.errors import BudgetWarning, InfeasibleBudget

Door = Callable[..., Outcome]


def solved(client: remat.Client, budget: str, **options: Any) -> Outcome:
    return Outcome(client.solve(traced(), budget, STRATEGY, **options).peak_bytes)


def planned(client: remat.Client, budget: str, **options: Any) -> Outcome:
    plan, _ = client.plan(traced(), budget, STRATEGY, **options)
    return Outcome(plan.peak_bytes)


def planned_in_pieces(client: remat.Client, budget: str, **options: Any) -> Outcome:
    plan, _ = client.plan(traced(), budget, STRATEGY, split=2, costs="roofline:h100", **options)
    return Outcome(plan.peak_bytes)


def optimized(client: remat.Client, budget: str, **options: Any) -> Outcome:
    model = net()
    step = client.optimize(
        model, budget, (batch(),), strategy=STRATEGY, costs=COSTS, split="off", **options
    )
    gradients = ran(model, step)
    plan = step.plan
    assert plan is not None
    return Outcome(plan.peak_bytes, gradients)


DOORS = (
    solved,
    *(pytest.param(door, marks=pytest.mark.slow) for door in (planned, planned_in_pieces)),
    pytest.param(optimized, marks=pytest.mark.slow),
)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_smallest_gives_the_peak_of_min_with_one_warning(server: Server, door: Door) -> None:
    with server.client() as client:
        smallest = door(client, "min")
        with pytest.raises(InfeasibleBudget):
            door(client, "5%")
        with pytest.warns(BudgetWarning, match="no plan fits the budget '5%'") as recorded:
            outcome = door(client, "5%", infeasible="smallest")
        door(client, "100%", infeasible="smallest")  # a warning would be an error here
    assert len(recorded) == 1
    assert outcome.peak_bytes <= smallest.peak_bytes


@pytest.mark.parametrize("value", ["smalest", "", 1, ["smallest"], {}])
def test_a_request_with_an_unknown_value_is_refused(http: httpx2.Client, value: object) -> None:
    answer = post(http, graph=chain(), budget="60%", infeasible=value)
    assert answer.status_code == 422
    assert "infeasible" in answer.text
