"""Laws of the time limit: a solve keeps it, in whatever form the step is solved; and a longer one
makes no plan worse by more than the gap that ends a search early."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES

import remat
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest, TraceSolver
from remat.choice.step import plan_step
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.progress import Clock

GAP = 0.005


LIMITS_S = (2.0, 6.0, 18.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "resnet", "t5"])
def test_a_longer_time_limit_gives_no_worse_plan(family: str) -> None:
    torch.manual_seed(0)
    case = FAMILIES[family]()
    costs = remat.Roofline("h100")
    graph = remat.measure(remat.trace(case.model, case.args, case.kwargs), costs).graph()
    smallest = [remat.solve(graph, "min", auto(limit_s)).peak_bytes for limit_s in LIMITS_S]
    for more, less in pairwise(smallest):
        assert less <= more * (1 + auto(1.0).peak_gap)
    for budget in (smallest[-1], int(1.1 * smallest[-1])):
        plans = [remat.solve(graph, budget, auto(limit_s)) for limit_s in LIMITS_S[1:]]
        for before, after in pairwise(plans):
            assert after.time_s <= before.time_s * (1 + GAP)


def auto(limit_s: float) -> remat.Auto:
    return remat.Auto(gap=GAP, time_limit=limit_s)


@pytest.mark.slow_cases("auto-Auto", "auto-Exact")
@pytest.mark.parametrize("strategy", [remat.Auto, remat.Exact])
@pytest.mark.parametrize("split", ["off", "auto"])
def test_without_any_time_the_smallest_peak_is_below_that_without_recomputation(
    strategy: type[remat.Auto], split: str
) -> None:
    trace = trace_of("gpt2")
    plan = remat.solve_step(trace, "min", strategy(time_limit=1e-6), split=split).plan
    baseline_bytes = plan.baseline_peak_bytes
    assert plan.peak_bytes < 0.9 * baseline_bytes
    if split == "auto":
        whole = remat.solve(trace, "min", strategy(time_limit=1e-6))
        assert plan.peak_bytes <= whole.peak_bytes


OVERRUN_S, LIMIT_S = 1.0, 3.0

FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in pieces": {"split": "auto"},
    "offloaded": {"offload": "auto"},
    "in pieces, offloaded": {"split": "auto", "offload": "auto"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "budget"), list(product(["convnext", "gpt2"], FORMS, ["min", "60%", "35%"]))
)
def test_a_step_is_solved_within_the_time_limit(family: str, form: str, budget: str) -> None:
    """The time is that of this process, so that other processes do not matter."""
    trace = trace_of(family)
    strategy = remat.Auto(gap=0.0, time_limit=LIMIT_S, threads=1)
    begin_s = time.process_time()
    with suppress(remat.InfeasibleBudget):
        remat.solve_step(trace, budget, strategy, **FORMS[form])
    assert time.process_time() - begin_s <= LIMIT_S + OVERRUN_S


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "pieces"), list(product(["min", "60%", "35%"], [(), PIECES])))
def test_calls_in_flight_are_solved_within_the_time_limit(
    budget: str, pieces: tuple[int, ...]
) -> None:
    """All solves have one time limit: the quick ones, and one or two in full."""
    strategy = remat.Auto(gap=0.0, time_limit=LIMIT_S, threads=1)
    request = PlanRequest(Limits(Budget.parse(budget)), strategy, pieces, in_flight=3)
    trace = trace_of("gpt2")
    begin_s = time.process_time()
    with suppress(remat.InfeasibleBudget):
        plan_step(trace, request, measure=lambda split: remat.measure(split, remat.Roofline("cpu")))
    assert time.process_time() - begin_s <= LIMIT_S + OVERRUN_S


def trace_of(family: str) -> remat.Trace:
    torch.manual_seed(0)
    if family != "convnext":
        case = FAMILIES[family]()
        return remat.measure(remat.trace(case.model, case.args, case.kwargs), remat.Roofline("cpu"))
    transformers: Any = pytest.importorskip("transformers")
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=10))
    arguments = {"labels": torch.zeros(8, dtype=torch.long)}
    traced = remat.trace(model, (torch.randn(8, 3, 128, 128),), arguments)
    return remat.measure(traced, remat.Roofline("cpu"))


def test_the_end_of_the_time_limit_is_no_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled solve ends without a schedule; one that is late takes the first."""
    monkeypatch.setattr("remat.strategies.search.eviction._CANCEL_GRACE_S", -1.0)
    request = PlanRequest(Limits(Budget.parse("60%")), auto(5.0), PIECES)
    chosen = plan_step(
        trace_of("gpt2"),
        request,
        measure=lambda split: remat.measure(split, remat.Roofline("cpu")),
        clock=Clock.of(0.0),
    )
    assert chosen.plan.peak_bytes <= chosen.plan.budget_bytes


class _Seconds:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("choices", [0, 1, 2])
@pytest.mark.parametrize("limit_s", [1.0, 60.0, 600.0])
def test_solves_that_use_their_limits_end_in_time(
    choices: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = _Seconds()
    monkeypatch.setattr("remat.progress.time", SimpleNamespace(monotonic=seconds))
    pieces, offload = ((), None) if choices == 0 else (PIECES, None)
    if choices == 2:
        offload = OffloadLimits(remat.Link(1e9, 1e9))
    budget = Budget.parse("min")
    request = PlanRequest(Limits(budget), auto(limit_s), pieces, offload)
    clock = request.clock()
    solver = TraceSolver(request, budget, None, clock, remat.solve, lambda trace: trace)
    solves = 0
    for _ in range(choices):
        seconds.now_s += solver.choice_limit_s
    while not clock.is_set():
        strategy: Any = solver.next_strategy()
        seconds.now_s += strategy.time_limit
        solves += 1
        if solves == 1:
            assert strategy.time_limit >= 0.25 * limit_s or choices == 2
    assert seconds.now_s <= limit_s + 0.1
    assert solves >= (1, 3, 4)[choices]


def test_the_first_of_the_time_limit_and_the_caller_ends_choices() -> None:
    class Event:
        def is_set(self) -> bool:
            return True

    request = PlanRequest(Limits(Budget.parse("min")), auto(60.0))
    assert request.clock(Event()).is_set()
    assert not request.clock().is_set()
