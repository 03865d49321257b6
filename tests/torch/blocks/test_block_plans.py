"""The plan of a step of blocks is a `Plan`: a graph and a schedule with the peak and time that were
chosen, which can be explained, drawn and saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.block_models import Block, Net, Routed, enabled, net, plan_of, step
from torch import nn

import remat
from remat.blockwise.block_step import StepOutcome
from remat.errors import InfeasibleBudget
from remat.frontend.blocks import block_planning


class Masked(Net):
    """Blocks that share an input."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids) * self.scale
        mask = x.detach().square().mean(-1, keepdim=True).expand_as(x).clone()
        for block in self.blocks:
            x = block(x, mask)
        return nn.functional.cross_entropy(self.head(x), ids)


class Monitored(Net):
    """The result of the last block is no part of the loss."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids) * self.scale
        for block in self.blocks[:-1]:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids), self.blocks[-1](x)


def _blocks(count: int) -> list[nn.Module]:
    return [Block(32) for _ in range(count)]


def _twice() -> list[nn.Module]:
    first, second = _blocks(2)
    return [first, second, first]


_CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "planned": (lambda: Net(_blocks(4)), "75%", {}),
    "shared input": (lambda: Masked(_blocks(3)), "70%", {}),
    "called twice": (lambda: Net(_twice()), "70%", {}),
    "without a backward": (lambda: Monitored(_blocks(4)), "75%", {"differentiate": "[0]"}),
    "in flight": (lambda: Net(_blocks(4)), "60%", {"in_flight": 3}),
    "eager": (lambda: Net([Routed(32) for _ in range(3)]), "min", {"costs": remat.Roofline("cpu")}),
    "offloaded": (
        lambda: Net([Block(64) for _ in range(6)], 64), "45%",
        {"offload": "auto", "link": remat.Link(2e10, 1e10), "costs": remat.Roofline("cpu")},
    ),
}  # fmt: skip


@pytest.mark.quick_cases("planned", "offloaded")
@pytest.mark.parametrize("case", _CASES)
def test_the_graph_has_the_peak_and_time_of_the_choice(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, budget, options = _CASES[case]
    outcomes: dict[int, StepOutcome] = {}
    original = block_planning.schedule_of_step

    def schedule_of_step(*args: Any) -> Any:
        written = original(*args)
        outcomes[id(written.graph)] = args[2]
        return written

    monkeypatch.setattr(block_planning, "schedule_of_step", schedule_of_step)
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 50, (4096,))
    enabled(model, budget, **options)
    step(model, ids, 1)
    plan = plan_of(model)
    outcome = outcomes[id(plan.graph)]
    assert plan.peak_bytes == outcome.peak_bytes <= plan.budget_bytes
    assert plan.time_s == pytest.approx(outcome.time_s)
    assert bool(plan.host_bytes) == (case == "offloaded") == bool(plan.graph.renewal)
    assert len(plan.schedule) > len(plan.graph) or case == "offloaded"
    if case == "eager":
        assert "checkpointed" in {call.how for call in plan.calls}
    read = remat.Plan.from_json(plan.to_json())
    assert (read.graph, read.schedule) == (plan.graph, plan.schedule)
    assert "blocks.0" in plan.to_html()


@pytest.mark.slow
def test_the_plan_prints_a_table_of_its_blocks_and_explains_their_operations() -> None:
    model, ids = net()
    enabled(model, "75%")
    step(model, ids, 1)
    plan = plan_of(model)
    text = str(plan)
    assert "blocks.*  Block, planned" in text
    assert f"{plan.peak_bytes / plan.baseline_peak_bytes:.1%} of" in text
    assert "not planned" not in text
    recomputed = next(iter(plan.schedule.recomputed(plan.graph)))
    assert "recomputed" in plan.explain(plan.graph.operations[recomputed].name)
    assert "blocks.0.gelu_backward" in plan.explain("blocks.0")


class Attending(nn.Module):
    """A block that cannot be captured, with attention from a token that sees none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.isinf().any():
            return x
        y = self.linear(x)
        scores = (y @ y.transpose(-1, -2)).masked_fill(mask, float("-inf"))
        return x + scores.softmax(-1) @ y


def test_blocks_whose_results_have_nan_are_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attending() for _ in range(3))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, mask)
            return x.nan_to_num().sum()

    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, 0] = True
    run = remat.enable(Net(), "min", scope="blocks")
    with caplog.at_level(logging.INFO, logger="remat"):
        run(torch.randn(2, 4, 8), mask).backward()
    assert "is not recomputed" not in caplog.text


def test_an_error_without_a_minimum_is_not_the_smallest() -> None:
    errors = [InfeasibleBudget("no minimum"), InfeasibleBudget("5", min_feasible_bytes=5)]
    assert str(block_planning._smallest_infeasible_error(errors, [])) == "5"
