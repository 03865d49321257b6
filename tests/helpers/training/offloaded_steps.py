"""A small step whose tensors are offloaded, and what it computes."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.training.models import Case
from tests.helpers.training.steps import assert_same, step_of
from torch import nn

import remat
from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.passes.offload.candidates import idle_spans, offloadable_values
from remat.passes.offload.copies_in_graph import HostStay
from remat.passes.offload.copies_in_trace import offload_tensors
from remat.schedule import Schedule

FAST, SLOW = Link(1e12, 1e12), Link(2e9, 1e9)
SMALL_BYTES = 256


class Net(nn.Module):
    """Layers with norms and dropout, and a loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1),
                              nn.Linear(96, 32))
                for _ in range(layers)
            )
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def net_case(layers: int = 4, rows: int = 64) -> Case:
    """Return a `Net` with its batch."""
    torch.manual_seed(0)
    return Case(Net(layers), (torch.randn(rows, 32),), loss=lambda loss: loss)


def measured(case: Case, device: str | None = None) -> Trace:
    """Return the trace of a case with costs from the roofline."""
    trace = remat.trace(case.model, case.args, case.kwargs, device=device)
    return remat.measure(trace, remat.Roofline(device or "cpu"))


def host_stays(trace: Trace, *, of_backward: bool = False) -> list[HostStay]:
    """Return a stay of each tensor that the backward reads: of the forward, or of both."""
    graph = trace.graph()
    return [
        HostStay(v)
        for v, span in idle_spans(graph, offloadable_values(trace)).items()
        if graph.values[v].size_bytes >= SMALL_BYTES
        and span.next_reader is not None
        and (of_backward or not graph.operations[graph.producer[v]].backward)
    ]


def offloaded(trace: Trace, link: Link, *, of_backward: bool = False) -> Trace:
    """Return the trace with all these tensors offloaded."""
    return offload_tensors(trace, host_stays(trace, of_backward=of_backward), link)


def lowered(trace: Trace, model: nn.Module, schedule: Schedule | None = None) -> Any:
    """Return the model with the program of a trace that retains everything, or of a schedule."""
    return remat.lower(remat.rewrite(trace, schedule or Schedule.keep_all(trace.graph())), model)


def assert_eager_numbers(trace: Trace, case: Case, schedule: Schedule | None = None) -> None:
    """Check that a step computes what eager mode computes, bit for bit, and again."""
    expected = step_of(case)
    module = lowered(trace, case.model, schedule)
    for _ in range(2):
        assert_same(step_of(case, module), expected)
