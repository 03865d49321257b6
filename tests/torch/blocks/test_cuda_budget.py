"""A budget in bytes of a step that is planned by blocks, on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.helpers.training.models import WithParts
from torch import nn

import remat

pytestmark = pytest.mark.gpu


class Block(WithParts, up=(64, 256), down=(256, 64)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def requested_peak_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of the second step."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def test_the_workspaces_of_cublas_count_as_part_of_a_budget_in_bytes() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    model = nn.Sequential(*(Block() for _ in range(8))).cuda()
    x = torch.randn(512, 64, device="cuda")
    earlier_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
    eager_bytes = requested_peak_bytes(model, x)
    model.zero_grad(set_to_none=True)
    workspaces = torch.cuda.memory_stats()["requested_bytes.all.current"] - earlier_bytes
    budget_bytes = workspaces + int(0.8 * (eager_bytes - workspaces))
    remat.enable(model, budget_bytes, (x,), scope="blocks", costs=remat.Roofline("h100"))
    (plan,) = remat.plans(model)
    assert requested_peak_bytes(model, x) <= plan.peak_bytes <= budget_bytes
    # The plan has a workspace of cuBLASLt for the backward, too, which eager mode does not use.
    assert plan.baseline_peak_bytes == pytest.approx(
        eager_bytes, rel=0.005, abs=(1 << 20) + 400_000
    )


def test_small_tensors_count_as_the_blocks_that_the_allocator_gives_them() -> None:
    """Each tensor takes a multiple of 512 bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    model = nn.Sequential(*(Block() for _ in range(8))).cuda()
    for index in range(2000):
        model.register_buffer(f"scalar_{index}", torch.zeros((), device="cuda"))
    x = torch.randn(512, 64, device="cuda")
    remat.enable(model, "100%", (x,), scope="blocks", costs=remat.Roofline("h100"))
    (plan,) = remat.plans(model)
    gc.collect()
    requested_peak_bytes(model, x)
    assert torch.cuda.max_memory_allocated() <= plan.peak_bytes
