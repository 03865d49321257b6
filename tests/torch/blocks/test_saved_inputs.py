"""Inputs of a block that its plan saves for the backward."""

from __future__ import annotations

import torch
from torch import nn

import remat
from remat.blockwise.saved_inputs import SavedInputs


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
