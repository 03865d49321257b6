"""`remat.fit` of convolutions, whose workspaces are measured where the GPU is in this machine."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import remat
from remat.frontend.costs.operation_costs import with_measured_convolutions


class Loss(nn.Module):
    """The mean, so that the step has no other outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def convolutions(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return convolutions and a product: without cuDNN, convolutions use cuBLAS, too."""
    torch.manual_seed(0)
    layers = (nn.Conv3d(8, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1))
    model = nn.Sequential(*layers, nn.Linear(32, 8), Loss()).to(device)
    return model, torch.randn(4, 8, 32, 32, 32, device=device)


def test_an_answer_for_an_absent_gpu_says_that_workspaces_are_unknown() -> None:
    model, x = convolutions("meta")
    answer = remat.fit(model, (x,), device="h100")
    assert (
        "workspaces that cuDNN takes for 4 convolutions, forward and backward, are unknown"
        in (answer.notes[0])
    )
    assert not remat.fit(model, (x,), device="cpu", memory="1TiB").notes


def test_times_stay_where_convolutions_are_measured() -> None:
    model, x = convolutions("cpu")
    roofline = remat.Roofline("h100")
    trace = remat.measure(remat.trace(model, (x[:1, :, :4],)), roofline)
    measured = with_measured_convolutions(trace)
    assert [n.cost_s for n in measured.nodes] == [n.cost_s for n in trace.nodes]
    assert {n.cost_source for n in measured.nodes} == {n.cost_source for n in trace.nodes}


@pytest.mark.gpu
def test_the_peak_contains_measured_workspaces() -> None:
    model, x = convolutions("cuda")
    answer = remat.fit(model, (x,), optimizer="sgd", memory="1TiB")
    assert "workspaces of 4 convolutions, forward and backward, measured on this GPU" in str(answer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert answer.memory.peak_bytes == pytest.approx(peak_bytes, rel=0.02)
    absent = remat.fit(model, (x,), device="h100", optimizer="sgd", memory="1TiB")
    assert absent.memory.peak_bytes <= answer.memory.peak_bytes
