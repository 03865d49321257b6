"""Branches on random numbers: constant where all numbers from 0 to 1 have the same answer, else an
error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat

CONSTANT: dict[str, Callable[[torch.Tensor], bool]] = {
    "above 0": lambda x: bool(torch.rand(1) > 0.0),
    "below 0": lambda x: bool(torch.rand([]) < 0),
    "at least 1": lambda x: bool(torch.rand(()) >= 1),
    "up to 1.0 in float64": lambda x: bool(torch.rand((), dtype=torch.float64) <= 1.0),
    "function": lambda x: bool(torch.gt(torch.rand(()), 0.0)),
}


def scaled(x: torch.Tensor) -> bool:
    return bool(torch.rand(()).mul_(10) > 1)


def shifted(x: torch.Tensor) -> bool:
    number = torch.rand(1)
    number -= 0.5
    return bool(number < 0)


def resampled(x: torch.Tensor) -> bool:
    number = torch.rand(())
    number.normal_()
    return bool(number >= 0)


def through_a_view(x: torch.Tensor) -> bool:
    numbers = torch.rand(4)
    numbers[:2].fill_(-3)
    return bool((numbers < 0).any())


def of_an_input(x: torch.Tensor) -> bool:
    number = torch.rand(())
    number.copy_(x[0, 0])
    return bool(number < 0)


VARIABLE: dict[str, Callable[[torch.Tensor], bool]] = {
    "a half": lambda x: bool(torch.rand(1) > 0.5),
    "scaled": scaled,
    "shifted": shifted,
    "resampled": resampled,
    "through a view": through_a_view,
    "of an input": of_an_input,
    "half precision": lambda x: bool((torch.rand(4, dtype=torch.bfloat16) > 0).all()),
    "many": lambda x: bool((torch.rand(100_000) > 0).all()),
    "by keyword": lambda x: bool(torch.gt(torch.rand(()), other=0.5)),
    "constant, then sampled": lambda x: bool(torch.zeros(()).normal_() > 0),
    "constant, then drawn": lambda x: bool(torch.zeros(4).bernoulli_(0.5).any()),
    "two numbers": lambda x: bool(torch.rand(()) > torch.rand(())),
}


class Branch(nn.Module):
    def __init__(self, condition: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.first, self.second, self.condition = nn.Linear(4, 4), nn.Linear(4, 4), condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.first if self.condition(x) else self.second
        return nn.functional.dropout(layer(x), 0.5).sum()


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_branch_is_that_of_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    model, x = Branch(CONSTANT[name]), torch.randn(3, 4)
    planned = remat.optimize(model, "100%", (x,), costs=remat.Roofline("cpu"))
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(planned(x), expected)


@pytest.mark.parametrize("name", VARIABLE)
def test_another_branch_is_an_error(name: str) -> None:
    with pytest.raises(remat.TraceError, match="depends on tensor values"):
        remat.trace(Branch(VARIABLE[name]), (torch.randn(3, 4),))
