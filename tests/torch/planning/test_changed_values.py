"""The law of Python values that change: a warning once for one that changes in each step, and a
change is reported by its name, with the size of a container or an array in place of its items."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import remat

OPTIONS: dict[str, Any] = {
    "costs": remat.Roofline("cpu"),
    "split": "off",
    "strategy": remat.Auto(time_limit=1),
}


class Scaled(nn.Module):
    """A model that reads one attribute, and one argument outside of its blocks."""

    def __init__(self, value: Any = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value = value
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        value = self.value if isinstance(self.value, float) else self.value[0]
        return (self.blocks(x) * scale * value).square().mean()


@pytest.mark.slow_cases("blocks")
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_value_that_changes_in_each_step_is_reported_once(
    scope: Literal["model", "blocks"], caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled()
    run = remat.enable(model, "80%", scope=scope, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        for step in range(6):
            model.zero_grad()
            run(torch.ones(64, 8), 1.0 + step).backward()
    (warning,) = [
        r.message for r in caplog.records if "each new value needs a capture" in r.message
    ]
    assert warning.startswith("the argument args[1] is 4.0 instead of 3.0:")
    assert "pass it as a tensor" in warning


def test_several_arguments_that_change_in_each_step_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ScaledTwice(Scaled):
        def forward(self, x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            return super().forward(x, scale) + shift

    run = remat.enable(ScaledTwice(), "100%", **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="remat"):
        for step in range(6):
            run(torch.ones(4, 8), 1.0 + step, 2.0 + step).backward()
    (warning,) = [r.message for r in caplog.records if "each new value needs" in r.message]
    assert "the argument args[1] is 5.0 instead of 4.0 and the argument args[2] is 6.0" in warning


@pytest.mark.slow_cases("value3-changed3-value is a numpy.ndarray of shape (3,) with other content")
@pytest.mark.parametrize(
    ("value", "changed", "text"),
    [
        (dict.fromkeys(range(200), 1.0), dict.fromkeys(range(200), 2.0),
         "value is a dict of 200 items with other content"),
        ([1.0], [2.0, 3.0], "value is a list of 2 items instead of a list of 1 item"),
        ((1.0, {1}), (2.0, {1}), "value is a tuple of 2 items with other content"),
        (np.ones(3), np.zeros(3), "value is a numpy.ndarray of shape (3,) with other content"),
        (1.0, 2.0, "value is 2.0 instead of 1.0"),
    ],
)  # fmt: skip
def test_a_changed_value_is_described_briefly(
    value: Any, changed: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled(value)
    run = remat.enable(model, "80%", scope="model", **OPTIONS)
    with caplog.at_level(logging.INFO, logger="remat"):
        for item in (value, changed):
            model.value = item
            model.zero_grad()
            run(torch.ones(64, 8)).backward()
    (report,) = [r.message for r in caplog.records if r.message.startswith("value is ")]
    assert report.startswith(f"{text}:")
    assert len(report) < 300


@pytest.mark.parametrize(("scope", "budget"), [("model", "70%"), ("blocks", "80%")])
def test_a_smaller_step_may_use_the_budget_of_a_larger_one(
    scope: Literal["model", "blocks"], budget: str
) -> None:
    """With frozen blocks, this percentage of the memory without recomputation is infeasible."""
    model = Scaled()
    run = remat.enable(model, budget, scope=scope, **OPTIONS)
    for frozen in (False, True, False):
        model.blocks[:2].requires_grad_(not frozen)
        model.zero_grad()
        run(torch.ones(64, 8)).backward()
    first, second = remat.plans(model)
    assert max(first.peak_bytes, second.peak_bytes) <= first.budget_bytes == second.budget_bytes
