"""torch.compile(backend="remat") block by block; and on two real processes over gloo: DDP,
FSDP2, tensor parallel."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import EAGER
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.memory.meter import allocated_peak

pytestmark = pytest.mark.usefixtures("empty_compile_caches")

WIDTH = 128

ONE_OR_BOTH = [False, pytest.param(True, marks=[pytest.mark.slow, needs_compiler])]
"""Without Inductor, and with it, which takes a minute."""


class Block(nn.Module):
    """A block of several parts with dropout, a norm and a residual: enough to recompute one by
    one."""

    def __init__(self, parts: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(parts))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(parts))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), self.dropout, self.training)
        return x


class WithLoss(nn.Module):
    """A module whose graph is the whole step, except for reading the loss."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().mean()


def block_stack(blocks: int = 2, parts: int = 3, dropout: float = 0.1) -> nn.Sequential:
    """Return a model with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(parts, dropout) for _ in range(blocks)))


def batch(rows: int = 512) -> torch.Tensor:
    """Return a batch that differs in each process and requires a gradient, as from an embedding:
    all blocks have one graph."""
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(rows, WIDTH, requires_grad=True)


def gradients(run: Any, x: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """Run one step without earlier gradients; return all gradients, gathered."""
    run.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    run(x).square().mean().backward()
    return [gathered(p.grad) for p in run.parameters()]


def gathered(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def assert_equal(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for actual_gradient, expected in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            actual_gradient, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
        )


def assert_kept(plans: list[CompiledPlan], inductor: bool) -> None:
    """Check that plans are within their budgets; with Inductor, by the verified peaks."""
    assert plans
    for plan in plans:
        peak_bytes = plan.verified_bytes if inductor else plan.plan.peak_bytes
        assert peak_bytes is not None
        assert plan.budget_bytes is not None
        assert peak_bytes <= plan.budget_bytes < plan.baseline_bytes
        assert len(plan.plan.schedule) > len(plan.plan.graph)


def run_in_two_processes(work: Callable[..., None], directory: Path, *args: object) -> None:
    """Run a function in two processes, and raise the error of either."""
    mp.spawn(_process, args=(str(directory / "store"), work, args), nprocs=2)


def _process(rank: int, store: str, work: Callable[..., None], args: tuple[object, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        work(*args)
    finally:
        dist.destroy_process_group()


# -- block by block -------------------------------------------------------------------------------


def plans_of(blocks: nn.Sequential, options: list[dict[str, Any]], x: torch.Tensor) -> Any:
    torch._dynamo.reset()
    before = len(remat.compiled_plans())
    for block, block_options in zip(blocks, options, strict=True):
        block.compile(backend="remat", options=block_options)
    blocks(x).square().mean().backward()
    return remat.compiled_plans()[before:]


@pytest.mark.slow_cases("False")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_blocks_of_one_class_have_one_plan(needs_gradient: bool) -> None:
    """And a second one where the first block's input needs no gradient. Each plan is for one
    block."""
    options = {"budget": "80%", "inductor": False, "time_limit": 2.0}
    x = torch.randn(512, WIDTH, requires_grad=needs_gradient)
    plans = plans_of(block_stack(blocks=4), [options] * 4, x)
    assert len(plans) == (1 if needs_gradient else 2)
    assert all(plan.external_bytes == 0 for plan in plans)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_shared", [True, False])
def test_blocks_with_the_same_options_object_share_its_budget(is_shared: bool) -> None:
    options = {"budget": "80%", "inductor": False, "time_limit": 2.0}
    model = nn.Sequential(Block(3, 0.1), WithLoss(Block(3, 0.1)))
    block_options = [options, options if is_shared else dict(options)]
    first, second = plans_of(model, block_options, torch.randn(512, WIDTH))
    assert first.external_bytes == 0
    assert first.saved_bytes > 0
    assert second.external_bytes == (first.saved_bytes if is_shared else 0)


# -- DDP ------------------------------------------------------------------------------------------


def _blocks_under_ddp(inductor: bool) -> None:
    torch._dynamo.config.optimize_ddp = False  # type: ignore[assignment]  # or blocks are cut
    plain, model = block_stack(), block_stack()
    options = {"budget": "75%", "time_limit": 2.0, "inductor": inductor}
    for block in plain:
        block.compile(backend="inductor" if inductor else EAGER)
    for block in model:
        block.compile(backend="remat", options=options)
    x = batch()
    expected, actual = (DistributedDataParallel(module) for module in (plain, model))
    for seed in (1, 2):
        assert_equal(gradients(actual, x, seed), gradients(expected, x, seed))
    assert_kept(remat.compiled_plans(), inductor)


@pytest.mark.slow
@pytest.mark.parametrize("inductor", ONE_OR_BOTH)
def test_compiled_blocks_under_ddp_train_as_eager_mode(inductor: bool, tmp_path: Path) -> None:
    """Dropout included, in a second step too."""
    run_in_two_processes(_blocks_under_ddp, tmp_path, inductor)


def _all_of_ddp(inductor: bool) -> None:
    torch.manual_seed(0)
    plain = Block(8, 0.1)
    model = copy.deepcopy(plain)
    expected, actual = (
        DistributedDataParallel(module, bucket_cap_mb=2) for module in (plain, model)
    )
    compare = torch.compile(expected, backend="inductor" if inductor else EAGER)
    options = {"budget": "85%", "time_limit": 2.0, "inductor": inductor}
    run = torch.compile(actual, backend="remat", options=options)
    x = batch()
    for seed in (1, 2):
        assert_equal(gradients(run, x, seed), gradients(compare, x, seed))
    plans = remat.compiled_plans()
    assert len(plans) == 3
    held_bytes = 0
    for plan in plans:
        assert plan.external_bytes == held_bytes
        assert plan.budget_bytes is not None
        assert plan.plan.peak_bytes <= plan.budget_bytes
        if inductor:
            assert plan.verified_bytes is not None
            assert plan.verified_bytes <= plan.budget_bytes
        held_bytes += plan.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("inductor", ONE_OR_BOTH)
def test_a_compiled_ddp_model_trains_within_the_budget(inductor: bool, tmp_path: Path) -> None:
    """DDP cuts it at its gradient buckets: several graphs of one step, each of which counts what
    those before it retain."""
    run_in_two_processes(_all_of_ddp, tmp_path, inductor)


# -- FSDP2 ----------------------------------------------------------------------------------------


def _sharded(**options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    model = block_stack(blocks=3, dropout=0.0)
    for block in model:
        block.compile(**options)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sharded_blocks(inductor: bool) -> None:
    eager, x = block_stack(blocks=3, dropout=0.0), batch()
    expected = gradients(eager, x)
    for gradient in expected:
        dist.all_reduce(gradient)
        gradient /= 2
    plain = _sharded(backend="inductor" if inductor else EAGER)
    budget = "65%" if inductor else "75%"  # kernels recompute much without a separate run
    options = {"budget": budget, "time_limit": 2.0, "inductor": inductor}
    model = _sharded(backend="remat", options=options)
    for _ in range(2):
        assert_equal(gradients(model, x), expected)
    assert_equal(gradients(plain, x), expected)
    (compiled,) = remat.compiled_plans()
    assert_kept([compiled], inductor)
    # Blocks save less, three times; the times of gathering and freeing shards vary.
    saved_bytes = compiled.baseline_saved_bytes - compiled.saved_bytes
    assert peak_of(model, x) < peak_of(plain, x) - saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("inductor", ONE_OR_BOTH)
def test_compiled_fsdp2_blocks_train_as_eager_mode(inductor: bool, tmp_path: Path) -> None:
    """The peak is below torch.compile's."""
    run_in_two_processes(_sharded_blocks, tmp_path, inductor)


def peak_of(run: Any, x: torch.Tensor) -> int:
    """Return the peak of a later step, above the memory before it."""
    run.zero_grad(set_to_none=True)
    return allocated_peak(lambda: run(x).square().mean().backward())


# -- tensor parallel ------------------------------------------------------------------------------


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = torch.randn(512, WIDTH, requires_grad=True)
    eager = WithLoss(Block(3, 0.0))
    model = copy.deepcopy(eager)
    for up, down in zip(model.block.up, model.block.down, strict=True):
        parallelize_module(up, mesh, ColwiseParallel())
        parallelize_module(down, mesh, RowwiseParallel())
    run = torch.compile(model, backend="remat", options={"budget": "65%", "time_limit": 2.0})
    expected = gradients(eager, x)
    for _ in range(2):
        assert_equal(gradients(run, x), expected)
    (compiled,) = remat.compiled_plans()
    assert_kept([compiled], inductor=True)
    plan = compiled.plan
    times = Counter(plan.schedule.runs)
    reduced = [i for i, op in enumerate(plan.graph.operations) if op.name.startswith("all_reduce")]
    assert len(reduced) == 6  # of three parts, forward and backward
    assert all(times[op] == 1 and not plan.graph.operations[op].recomputable for op in reduced)
    resident = [x, *(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())]
    # A thread of gloo may hold what it has reduced a moment longer than the step.
    measured = min(peak_of(run, x) for _ in range(5)) + sum(tensor.nbytes for tensor in resident)
    assert compiled.budget_bytes is not None
    assert measured <= compiled.budget_bytes


@needs_compiler
@pytest.mark.slow
def test_compiled_tensor_parallel_models_train_as_eager_mode(tmp_path: Path) -> None:
    """Collectives are in the graph, and run once."""
    run_in_two_processes(_tensor_parallel, tmp_path)
