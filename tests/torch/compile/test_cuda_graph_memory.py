"""The verified peak of `mode="reduce-overhead"`, on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
import torch._dynamo
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.frontend.memory.device_memory import keeps_cublas_workspaces, library_bytes

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 4096, 256


class Block(WithParts, up=(WIDTH, WIDTH), down=(WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(WithParts, blocks=lambda: nn.Sequential(*(Block() for _ in range(4)))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def requested_peak_bytes(compiled: nn.Module, x: torch.Tensor) -> int:
    """The peak of a step that starts without gradients."""
    compiled.zero_grad(set_to_none=True)
    torch.compiler.cudagraph_mark_step_begin()
    torch.cuda.reset_peak_memory_stats()
    compiled(x).backward()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


# Inductor captures an empty graph to create its memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32")
@needs_compiler
def test_the_copies_of_the_batch_that_cuda_graphs_read_are_part_of_the_verified_peak() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model, x = Model().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    earlier_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
    earlier_bytes -= sum(t.nbytes for t in (*model.parameters(), x))
    compiled = remat.compile(model, "min", mode="reduce-overhead", time_limit=5.0)
    peaks = [requested_peak_bytes(compiled, x) for _ in range(3)]
    plan = remat.compiled_plans()[-1]
    assert plan.batch_copy_bytes == x.nbytes
    assert plan.verified_bytes is not None
    # The first step plans, the second records graphs, with workspaces of cuBLAS and cuBLASLt.
    threads = 2 if keeps_cublas_workspaces() else 1
    workspace_bytes = library_bytes("cuda", ["aten.addmm.default"]) // threads
    recorded = peaks[1] - earlier_bytes - workspace_bytes
    assert 0.99 * plan.verified_bytes <= recorded <= plan.verified_bytes
