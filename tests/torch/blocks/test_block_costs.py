"""Seconds of a plan by blocks come from one source, which its text names; and so do the reasons why
blocks are planned by their submodules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.blockwise.blocks_plan import BlocksPlan
from remat.frontend.blocks import block_options

WIDTH = 64


@pytest.fixture(autouse=True)
def no_warnings_of_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """Leave out the log's warnings of blocks that branch, in this test only."""
    caplog.set_level(logging.ERROR, "remat")


class Block(nn.Module):
    """A block that can be captured unless it branches on its data."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branches and float(x.detach().abs().max()) > 1e6:
            x = 2 * x
        return x + self.down(nn.functional.gelu(self.up(x)))


def plan_of(branches: list[bool], budget: str) -> BlocksPlan:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(branches=b) for b in branches))
    options = {"costs": remat.Roofline("h100"), "strategy": remat.Auto(time_limit=1)}
    remat.enable(model, budget, (torch.randn(512, WIDTH),), scope="blocks", **options)  # type: ignore[arg-type]
    (plan,) = remat.plans(model)
    assert isinstance(plan, BlocksPlan)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branches", "budget"),
    [
        ([True, False, True, False], "min"),
        pytest.param([True, False, True, False], "100%", marks=pytest.mark.slow),
        pytest.param([True] * 4, "100%", marks=pytest.mark.slow),
        pytest.param([True] * 4, "min", marks=pytest.mark.slow),
    ],
)
def test_the_data_sheet_times_blocks_that_are_run(branches: list[bool], budget: str) -> None:
    """A step measured on this machine takes a hundred times as long as on the data sheet's."""
    captured, plan = plan_of([False] * 4, budget), plan_of(branches, budget)
    assert plan.baseline_time_s == pytest.approx(captured.baseline_time_s, rel=0.5)
    assert plan.time_s <= 2 * captured.baseline_time_s
    assert "roofline" in (plan.terms.cost_source or "")
    assert "roofline" in str(plan)


def test_a_plan_says_why_blocks_are_planned_by_their_submodules() -> None:
    plan = plan_of([True] * 4, "100%")
    reasons = [call.unplanned_reason for call in plan.calls] + [text for _, text in plan.replaced]
    assert any("branches" in reason or "x.detach()" in reason for reason in reasons), reasons
    assert "x.detach()" in str(plan)


def test_measuring_a_block_leaves_the_reserve_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_bytes: set[int] = set()

    def recording_measure(trace: remat.Trace, **options: Any) -> remat.Trace:
        limits_bytes.add(options["limit_bytes"])
        return remat.measure(trace, remat.Roofline("cpu"))

    monkeypatch.setattr(block_options, "measure", recording_measure)
    for budget, reserve in ((30 << 20, 20 << 20), (10 << 20, 0)):
        model = nn.Sequential(*(Block(branches=False) for _ in range(2)))
        batch = (torch.randn(512, WIDTH),)
        options = {"reserve": reserve, "strategy": remat.Auto(gap=0.5, time_limit=0.2)}
        remat.enable(model, budget, batch, scope="blocks", costs="cpu", **options)  # type: ignore[arg-type]
    (limit_bytes,) = limits_bytes
    assert limit_bytes < 10 << 20
