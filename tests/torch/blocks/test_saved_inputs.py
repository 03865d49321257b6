"""Inputs of a block that its plan saves for the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.training.steps import assert_same_steps
from torch import nn

import remat
from remat.blockwise.pareto_options import SavedInputs


def test_a_tensor_may_be_recomputed_in_the_forward_and_saved() -> None:
    """The program saves the second copy of it, which has another name."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())
    trace = remat.measure(remat.trace(model, (torch.randn(4, 8),)), remat.Roofline("cpu"))
    graph = trace.graph()
    whole = remat.Schedule.keep_all(graph)
    assert graph.boundary is not None
    expected = SavedInputs.of(trace, whole, remat.rewrite(trace, whole))
    repeated = next(
        op
        for op, operation in enumerate(graph.operations[: graph.boundary])
        if operation.name.startswith("gelu")
    )
    runs = list(whole.runs)
    runs.insert(runs.index(graph.boundary), repeated)
    schedule = remat.Schedule(tuple(runs))
    program = remat.rewrite(trace, schedule)
    assert any(name.endswith("__2") for name in program.saved)
    assert SavedInputs.of(trace, schedule, program).last_reads == expected.last_reads


class LayerOfParts(nn.Module):
    """A layer whose second instance cannot be captured, but its parts can."""

    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.opaque = opaque
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.second = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        if self.opaque and float(x.detach().sum()) > 1e9:  # a branch on data
            x = 2 * x
        return x + self.second(x)


@pytest.mark.slow
def test_a_layer_whose_parts_are_planned_is_not_checkpointed() -> None:
    """Another layer of its class is planned as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(LayerOfParts(False), LayerOfParts(True), LayerOfParts(False))
    x = torch.randn(32, 16)
    eager = copy.deepcopy(model)
    remat.enable(model, "min", scope="blocks", costs="cpu")
    assert_same_steps(model, eager, x, loss=torch.sum)
    (plan,) = remat.plans(model)
    paths = {call.path for call in plan.calls}
    assert {"0", "1.first", "1.second"} <= paths
