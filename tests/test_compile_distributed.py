"""torch.compile(backend="remat") on two real processes over gloo: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
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
from remat.frontend.compile.plans import CompiledPlan

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not (Path(get_path("include")) / "Python.h").exists(),
    reason="Inductor needs g++ and Python's headers",
)

WIDTH = 128


class Block(nn.Module):
    """Several parts with dropout, a norm and a residual: enough to recompute one by one."""

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


def made(blocks: int = 2, parts: int = 3, dropout: float = 0.1) -> nn.Sequential:
    """The same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(parts, dropout) for _ in range(blocks)))


def batch(rows: int = 512) -> torch.Tensor:
    """Another one in each process. As from an embedding: all blocks are one graph."""
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(rows, WIDTH, requires_grad=True)


def gradients(run: Any, x: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """Of a step from nothing, whole."""
    run.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    run(x).square().mean().backward()
    return [whole(p.grad) for p in run.parameters()]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def assert_kept(plans: list[CompiledPlan]) -> None:
    """Budgets, by what Inductor made of the plans."""
    assert plans
    for plan in plans:
        assert plan.verified_bytes is not None
        assert plan.budget_bytes is not None
        assert plan.verified_bytes <= plan.budget_bytes < plan.baseline_bytes
        assert len(plan.plan.schedule) > len(plan.plan.graph)


@pytest.fixture(autouse=True, scope="module")
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled once for all tests here and both processes; every graph is planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
        yield


def on_two(work: Callable[[], None], directory: Path) -> None:
    """Do this in two processes. What fails in one is raised here."""
    mp.spawn(_process, args=(work, str(directory / "store")), nprocs=2)


def _process(rank: int, work: Callable[[], None], store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        work()
    finally:
        dist.destroy_process_group()


# -- DDP ------------------------------------------------------------------------------------------


def _blocks_under_ddp() -> None:
    torch._dynamo.config.optimize_ddp = False  # type: ignore[assignment]  # or blocks are cut
    plain, model = made(), made()
    options = {"budget": "75%", "time_limit": 2.0}
    for block in plain:
        block.compile()
    for block in model:
        block.compile(backend="remat", options=options)
    x = batch()
    wanted, found = (DistributedDataParallel(each) for each in (plain, model))
    for seed in (1, 2):
        assert_equal(gradients(found, x, seed), gradients(wanted, x, seed))
    assert_kept(remat.compiled_plans())


def test_blocks_under_ddp(tmp_path: Path) -> None:
    """Dropout included, in a second step too."""
    on_two(_blocks_under_ddp, tmp_path)


def _all_of_ddp() -> None:
    torch.manual_seed(0)
    plain = Block(8, 0.1)
    model = copy.deepcopy(plain)
    wanted, found = (DistributedDataParallel(each, bucket_cap_mb=2) for each in (plain, model))
    compare = torch.compile(wanted)
    run = torch.compile(found, backend="remat", options={"budget": "85%", "time_limit": 2.0})
    x = batch()
    for seed in (1, 2):
        assert_equal(gradients(run, x, seed), gradients(compare, x, seed))
    plans = remat.compiled_plans()
    assert len(plans) == 3
    held_bytes = 0
    for plan in plans:
        assert plan.others_bytes == held_bytes
        assert plan.verified_bytes is not None
        assert plan.budget_bytes is not None
        assert plan.verified_bytes <= plan.budget_bytes
        held_bytes += plan.saved_bytes


@pytest.mark.slow
def test_all_of_ddp(tmp_path: Path) -> None:
    """Cut at the buckets of gradients: several graphs of one step, each of which counts what those
    before it hold."""
    on_two(_all_of_ddp, tmp_path)


# -- FSDP2 ----------------------------------------------------------------------------------------


def _sharded(**options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    model = made(blocks=3, dropout=0.0)
    for block in model:
        block.compile(**options)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _sharded_blocks() -> None:
    eager, x = made(blocks=3, dropout=0.0), batch()
    wanted = gradients(eager, x)
    for gradient in wanted:
        dist.all_reduce(gradient)
        gradient /= 2
    plain = _sharded()
    model = _sharded(backend="remat", options={"budget": "75%", "time_limit": 2.0})
    for _ in range(2):
        assert_equal(gradients(model, x), wanted)
    assert_equal(gradients(plain, x), wanted)
    (compiled,) = remat.compiled_plans()
    assert_kept([compiled])
    # Blocks save less, three times; when shards are gathered and freed is not the same each time.
    saved_bytes = compiled.baseline_saved_bytes - compiled.saved_bytes
    assert allocated_peak(model, x) < allocated_peak(plain, x) - saved_bytes


@pytest.mark.slow
def test_sharded_blocks(tmp_path: Path) -> None:
    """FSDP2: gradients are those of the eager model, and the peak is below torch.compile's."""
    on_two(_sharded_blocks, tmp_path)


def allocated_peak(run: Any, x: torch.Tensor) -> int:
    """Of a step that is not its first, above what was there before."""
    run.zero_grad(set_to_none=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run(x).square().mean().backward()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event[0])
    return max(itertools.accumulate((size for _, size in events), initial=0))


# -- tensor parallel ------------------------------------------------------------------------------


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = torch.randn(512, WIDTH, requires_grad=True)
    eager = Block(4, 0.0)
    model = copy.deepcopy(eager)
    for up, down in zip(model.up, model.down, strict=True):
        parallelize_module(up, mesh, ColwiseParallel())
        parallelize_module(down, mesh, RowwiseParallel())
    run = torch.compile(model, backend="remat", options={"budget": "70%", "time_limit": 2.0})
    wanted = gradients(eager, x)
    for _ in range(2):
        assert_equal(gradients(run, x), wanted)
    (compiled,) = remat.compiled_plans()
    assert_kept([compiled])
    plan = compiled.plan
    times = Counter(plan.schedule.runs)
    reduced = [i for i, op in enumerate(plan.graph.operations) if op.name.startswith("all_reduce")]
    assert len(reduced) == 8  # of four parts, forward and backward
    assert all(times[op] == 1 and not plan.graph.operations[op].recomputable for op in reduced)
    held = [x, *(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())]
    measured = allocated_peak(run, x) + sum(tensor.nbytes for tensor in held)
    assert compiled.budget_bytes is not None
    assert measured <= compiled.budget_bytes


def test_tensor_parallel(tmp_path: Path) -> None:
    """Collectives are in the graph, and run once."""
    on_two(_tensor_parallel, tmp_path)
