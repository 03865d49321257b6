"""The law of several calls before one backward: together they stay within the budget, from the
second step on, or from the first with `in_flight`; the first says that it may exceed it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.brute_force import cheapest
from tests.helpers.training.doors import DOORS, planned
from torch import Tensor, nn

import remat
from remat.choice.in_flight import plan_calls_in_flight
from remat.choice.plan_request import TracePlan
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.limits.budget import Budget
from remat.progress import Clock

OPTIONS: dict[str, Any] = {
    "differentiate": "all",
    "outputs": "dropped",
    "strategy": remat.Auto(time_limit=4),
}


def network(layer_count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32))
        for _ in range(layer_count)
    )
    return nn.Sequential(*layers)


GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [torch.randn(256, 32, generator=GENERATOR) for _ in range(3)]


def triplet(run: Callable[[Tensor], Tensor]) -> Tensor:
    return nn.functional.triplet_margin_loss(*map(run, BATCHES))


def discriminator(run: Callable[[Tensor], Tensor]) -> Tensor:
    real, fake, _ = BATCHES
    return run(real).sigmoid().log().mean() - run(fake).square().mean()


def unrolled(run: Callable[[Tensor], Tensor]) -> Tensor:
    state = BATCHES[0]
    for _ in range(4):
        state = state + run(state)
    return state.square().mean()


STEPS = {"triplet": (triplet, 3), "discriminator": (discriminator, 2), "unrolled": (unrolled, 4)}
BATCH_COUNTS = {triplet: 3, discriminator: 2, unrolled: 1}


def gradients(model: nn.Module, run: Any, step: Callable[..., Tensor]) -> tuple[list[Any], int]:
    """Return the loss and gradients of a step, and its peak in bytes."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    boundary = [*model.parameters(), *BATCHES[: BATCH_COUNTS[step]]]
    with LiveStorageMeter(unique_bytes(boundary)) as meter:
        loss = step(run)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], meter.peak_bytes


@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(
            name, door, marks=() if (name, door) == ("triplet", "optimize") else pytest.mark.slow
        )
        for name in STEPS
        for door in DOORS
    ],
)
def test_calls_before_one_backward_share_the_budget(
    name: str, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    step, calls = STEPS[name]
    model = network()
    expected, eager_peak = gradients(model, model, step)
    constant = unique_bytes([*model.parameters()]) * 2
    budget = constant + (eager_peak - constant) * 2 // 3

    noticing = copy.deepcopy(model)
    run = planned(noticing, door, budget, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        torch.testing.assert_close(gradients(noticing, run, step)[0], expected)
    warnings = [r for r in caplog.records if "is called again before the backward" in r.message]
    assert len(warnings) == 1
    gradients(noticing, run, step)
    actual, peak = gradients(noticing, run, step)
    torch.testing.assert_close(actual, expected)
    assert peak <= budget, f"{peak / budget:.1%} of the budget"

    caplog.clear()
    informed = copy.deepcopy(model)
    run = planned(informed, door, budget, in_flight=calls, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        actual, peak = gradients(informed, run, step)
    torch.testing.assert_close(actual, expected)
    assert peak <= budget, f"{peak / budget:.1%} of the budget"
    assert not [r for r in caplog.records if "before the backward" in r.message]


def output_of_this_step(run: Callable[[Tensor], Tensor]) -> Tensor:
    """A step with a call without a backward, whose output is referenced until the step ends."""
    unused, x, _ = BATCHES
    output = run(unused)
    loss = run(x).square().mean()
    loss.backward()
    del output
    return loss


def output_of_last_step() -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    """Return a step whose call without a backward is referenced until the next one replaces it."""
    references: dict[str, Tensor] = {}

    def step(run: Callable[[Tensor], Tensor]) -> Tensor:
        x, unused, _ = BATCHES
        loss = run(x).square().mean()
        loss.backward()
        references.pop("output", None)
        references["output"] = run(unused)
        return loss

    return step


STEPS_WITHOUT_BACKWARD = {
    "output of this step": lambda: output_of_this_step,
    "output of last step": output_of_last_step,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(name, door, marks=() if door == "optimize" else pytest.mark.slow)
        for name in STEPS_WITHOUT_BACKWARD
        for door in DOORS
    ],
)
def test_a_call_without_a_backward_counts_from_the_third_step_that_has_it(
    name: str, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()

    def peaks(model: nn.Module, run: Any, count: int) -> list[int]:
        step, peaks_bytes = STEPS_WITHOUT_BACKWARD[name](), []
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            with LiveStorageMeter(unique_bytes([*model.parameters(), *BATCHES[:2]])) as meter:
                step(run)
            peaks_bytes.append(meter.peak_bytes)
        return peaks_bytes

    eager_peak = peaks(copy.deepcopy(model), model, 3)[-1]
    constant = unique_bytes([*model.parameters()]) * 2
    budget = constant + (eager_peak - constant) * 2 // 3
    run = planned(model, door, budget, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        result = peaks(model, run, 5)
    (warning,) = [r.message for r in caplog.records if "is called again before" in r.message]
    assert "torch.no_grad()" in warning
    output_bytes = BATCHES[0].nbytes  # referenced in spite of outputs="dropped"
    assert max(result[3:]) <= budget + output_bytes
    assert max(result[:3]) > budget


@pytest.mark.slow
def test_outputs_that_a_program_never_releases_cause_no_replans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network(2)
    run = planned(model, "optimize", "80%", **OPTIONS)
    outputs = []
    with caplog.at_level(logging.INFO, logger="remat"):
        for _ in range(5):
            outputs.append(run(BATCHES[0]))
            run(BATCHES[1]).square().mean().backward()
    assert not [r for r in caplog.records if "calls before a backward" in r.message]


@pytest.mark.slow_cases("model", "blocks")
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_that_retains_the_graph_is_reported_once(
    door: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two losses of one call: each `backward` reads the saved tensors."""

    class Network(nn.Sequential):  # warnings are once for a class
        pass

    model = Network(*network().children())
    eager = copy.deepcopy(model)
    run = planned(model, door, "80%", **OPTIONS)

    def step(model: nn.Module, run: Any) -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        output = run(BATCHES[0])
        output.square().mean().backward(retain_graph=True)
        (output - 1).square().mean().backward()
        return [p.grad for p in model.parameters()]

    with caplog.at_level(logging.WARNING, logger="remat"):
        run(BATCHES[0]).square().mean().backward()
        assert not caplog.records
        for _ in range(2):
            torch.testing.assert_close(step(model, run), step(eager, eager))
    (warning,) = caplog.messages
    assert "has retain_graph=True" in warning
    assert "lower the budget" in warning


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_an_infeasible_budget_of_several_calls_names_a_feasible_one(door: str) -> None:
    model = network(2)
    budget = unique_bytes([*model.parameters()]) * 2 + 10_000
    with pytest.raises(remat.InfeasibleBudget) as infeasible:
        gradients(model, planned(model, door, budget, in_flight=3, **OPTIONS), triplet)
    feasible = infeasible.value.min_feasible_bytes
    assert feasible is not None
    model = network(2)
    run = planned(model, door, feasible, in_flight=3, **OPTIONS)
    peak = gradients(model, run, triplet)[1]
    assert peak <= feasible


def test_a_service_that_measures_plans_for_one_call() -> None:
    """Several calls need costs here: steps with more calls have the plan for one, with a warning,
    and a request for several is refused at once."""

    def service(trace: remat.Trace, budget: int | str) -> tuple[remat.Plan, remat.Program]:
        measured = remat.measure(trace, remat.Roofline("cpu"))
        plan = remat.solve(measured, budget)
        return plan, remat.rewrite(measured, plan.schedule)

    model = network(2)
    run = remat.optimize(model, "100%", service=service, costs="elsewhere")
    for _ in range(3):
        (run(BATCHES[0]).square().mean() + run(BATCHES[1]).square().mean()).backward()
    with remat.Client("http://127.0.0.1:9") as client, pytest.raises(ValueError, match="in_flight"):
        client.optimize(model, "100%", costs="roofline:h100", in_flight=2)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2, 3, 5])
def test_plans_for_several_calls_are_as_fast_as_brute_force_finds(calls: int) -> None:
    """Brute force over every limit of the saved bytes finds no faster plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 4), nn.Tanh(), nn.Linear(4, 8))
    trace = remat.measure(remat.trace(model, torch.randn(64, 4)), device=remat.Roofline("cpu"))
    inputs, tangents = 64 * 4 * 4, 64 * 8 * 4
    others = calls - 1

    def solve(limited: Any, budget: Budget, _: Clock) -> TracePlan:
        return TracePlan(limited, remat.solve(limited, budget, remat.Exact()))

    def peak_bytes(budget: str) -> int:
        return plan(budget).peak_bytes

    def plan(budget: int | str) -> remat.Plan:
        clock = Clock.of(math.inf)
        return plan_calls_in_flight(trace, Budget.parse(budget), calls, solve, clock).plan

    constant = trace.graph().constant_bytes
    smallest, baseline = peak_bytes("min"), peak_bytes("100%")
    for budget in (smallest, (smallest + baseline) // 2, baseline):
        times = []
        for saved in range(0, (budget - constant) // calls, 512):
            available = budget - others * (saved + inputs)
            workspace = available - constant - saved - tangents
            if workspace >= 0:
                limited = trace.replace(boundary_bytes=workspace).graph()
                times.append(cheapest(limited, available))
        best = min(t for t in times if t is not None)
        planned_calls = plan(budget)
        assert planned_calls.peak_bytes <= budget
        assert best - 1e-12 <= planned_calls.time_s <= best * 1.02
