"""Budgets that are a small part of the peak: few tensors on the host, back right before use."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.choice.late_copies import plan_with_late_copies
from remat.choice.offloadable_step import TraceStep
from remat.choice.offloaded_forms import OffloadLimits, least_time_s
from remat.choice.plan_request import PlanRequest, TraceSolver
from remat.documents.trace import Trace
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.plan import Plan
from remat.progress import Clock

WIDTH, ROWS, BLOCKS = 4096, 65536, 8


class Block(
    WithParts, norm=lambda: nn.LayerNorm(WIDTH), up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH)
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(WithParts, blocks=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS)))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum()


@pytest.fixture(scope="module")
def trace() -> Trace:
    with torch.device("meta"):
        model = Blocks().bfloat16()
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
    return remat.measure(remat.trace(model, (x,), device="h100"), remat.Roofline("h100"))


def late_plan(trace: Trace, budget_bytes: int, host_bytes: int | None = None) -> Plan | None:
    """Return the plan with late copies for a fast link."""
    budget, clock = Budget.parse(budget_bytes), Clock.of(math.inf)
    request = PlanRequest(Limits(budget), remat.Auto(time_limit=5))
    limits = OffloadLimits(remat.Roofline("gh200").link, host_bytes)
    solver = TraceSolver(request, budget, budget_bytes, clock, remat.solve, lambda trace: trace)
    chosen = plan_with_late_copies([TraceStep(trace)], budget_bytes, limits, solver, clock)
    return None if chosen is None else chosen.plan


@pytest.mark.slow
def test_a_tight_budget_costs_less_than_any_recomputation(trace: Trace) -> None:
    budget_bytes = int(0.2 * peak_bytes(trace))
    plan = late_plan(trace, budget_bytes)
    assert plan is not None
    assert plan.peak_bytes <= budget_bytes
    assert plan.time_s < least_time_s(trace.graph(), budget_bytes)


@pytest.mark.slow
def test_the_host_budget_is_kept(trace: Trace) -> None:
    budget_bytes, host_bytes = int(0.22 * peak_bytes(trace)), 2 << 30
    plan = late_plan(trace, budget_bytes, host_bytes)
    assert plan is not None
    assert plan.peak_bytes <= budget_bytes
    assert 0 < plan.host_bytes <= host_bytes


def test_nothing_is_solved_where_the_step_fits_or_an_operation_does_not(trace: Trace) -> None:
    assert late_plan(trace, peak_bytes(trace)) is None
    assert late_plan(trace, peak_bytes(trace) // 10) is None


def peak_bytes(trace: Trace) -> int:
    graph = trace.graph()
    return remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
