"""A longer time limit makes no plan worse by more than the gap that ends a search early."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.helpers.training.models import FAMILIES

import remat

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
