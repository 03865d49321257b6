"""Plans with offloading against brute force over all schedules with copies, on small steps."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.helpers.offload_brute_force import cheapest_with_offload
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step
from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.passes.offload.candidates import offloadable_values
from remat.progress import Clock

UNLIMITED = 1 << 40
MIN_BYTES = 4096
ROUNDING = 1e-6


class Chain(WithParts, weight=lambda: nn.Parameter(torch.ones(64))):
    """Large tensors that the backward needs late, and smaller ones that it needs at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        h = torch.cat([h, h, h, h]).sin().sum(0, keepdim=True)
        h = x * h
        return torch.cat([h, h, h]).sin().sum()


@pytest.fixture(scope="module")
def captured() -> Trace:
    """Without reuse of memory, which the brute force does not know."""
    trace = remat.measure(remat.trace(Chain(), (torch.randn(4, 64),)), remat.Roofline("cpu"))
    return trace.replace(reuses_memory=False)


def with_costs(trace: Trace, rng: random.Random) -> Trace:
    nodes = tuple(
        node if node.view else node.model_copy(update={"cost_s": rng.choice((0.5, 1.0, 3.0))})
        for node in trace.nodes
    )
    return trace.replace(nodes=nodes)


def plan_with_offload(trace: Trace, budget_bytes: int, limits: OffloadLimits) -> TracePlan:
    strategy = remat.Auto(time_limit=2, gap=0.0)
    request = PlanRequest(Limits(Budget.parse(budget_bytes)), strategy, offload=limits)
    return plan_step(trace, request, measure=lambda t: t, clock=Clock.of(math.inf))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "examples"),
    [
        ((20000.0,), 1),
        pytest.param(
            (500.0, 2000.0, 20000.0), 20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_no_plan_beats_brute_force_and_most_are_optimal(
    captured: Trace, rates: tuple[float, ...], examples: int
) -> None:
    rng = random.Random(0)
    ratios: list[float] = []
    offload_count = 0
    for _ in range(examples):
        trace, rate = with_costs(captured, rng), rng.choice(rates)
        graph, limits = trace.graph(), OffloadLimits(Link(rate, rate), None, MIN_BYTES)
        baseline = remat.simulate(graph, remat.Schedule.keep_all(graph))
        least_bytes = peak_lower_bound_bytes(graph)
        share = rng.choice((0.0, 0.3, 0.7))
        budget_bytes = least_bytes + int(share * (baseline.peak_bytes - least_bytes))
        values = frozenset(
            v for v in offloadable_values(trace) if graph.values[v].size_bytes >= MIN_BYTES
        )
        assert len(values) == 2
        optimum = cheapest_with_offload(graph, budget_bytes, limits.link, values, UNLIMITED)
        chosen = plan_with_offload(trace, budget_bytes, limits)
        assert optimum is not None
        assert chosen.plan.peak_bytes <= budget_bytes
        ratios.append(chosen.plan.time_s / optimum)
        offload_count += chosen.trace is not trace
    assert min(ratios) >= 1 - ROUNDING
    assert sum(ratio <= 1 + ROUNDING for ratio in ratios) >= 0.8 * len(ratios)
    assert offload_count
