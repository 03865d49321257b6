"""FSDP2 with blocks that are planned separately: two real processes over gloo."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.helpers.training.block_models import Block, Net, Output, step
from tests.helpers.training.models import WithParts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import remat
from remat.blockwise.blocks_plan import BlocksPlan
from remat.frontend.api.enable import is_enabled
from remat.frontend.blocks import candidates
from remat.frontend.blocks.fsdp2 import unreduced_gradients
from remat.frontend.memory.meter import allocated_peak, measure_step

KINDS: dict[str, dict[str, Any]] = {
    "enabled first": {},
    "sharded first": {},
    "not freed after the forward": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "blocks alone": {},
    "offloaded": {},
}
OFFLOAD: dict[str, Any] = {"offload": "auto", "link": remat.Link(1e12, 1e12)}


@contextmanager
def _group(rank: int, store: str, size: int = 2) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _shard(model: nn.Module, kind: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **KINDS[kind])  # type: ignore[arg-type]
    if kind != "blocks alone":
        fully_shard(model, mesh=mesh, **KINDS[kind])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _worker(rank: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    with _group(rank, f"{folder}/store"):
        torch.manual_seed(0)
        model = Net([Block(32) for _ in range(4)])
        eager = copy.deepcopy(model)
        _shard(eager, kind)
        if kind != "enabled first":
            _shard(model, kind)
        options: dict[str, Any] = {"scope": "blocks", "outputs": "dropped"}
        if kind == "offloaded":
            candidates.MIN_BYTES = 1024  # the tensors of this model are small
            options |= OFFLOAD
        remat.enable(model, "60%", costs=remat.Roofline("cpu"), **options)
        if kind == "enabled first":
            _shard(model, kind)
        torch.manual_seed(100 + rank)
        ids = torch.randint(0, 50, (512,))
        equal = True
        for seed in range(4):  # the last two add to gradients
            peaks: list[list[torch.Tensor]] = []
            for module in (eager, model):
                if seed < 3:
                    module.zero_grad(set_to_none=True)
                torch.manual_seed(seed + 10 * rank)
                loss = module(ids).loss
                loss.backward()
                grads = (p.grad for p in module.parameters())
                peaks.append([loss.detach(), *(_own(g).clone() for g in grads if g is not None)])
            equal &= len(peaks[0]) == len(peaks[1]) and all(map(torch.equal, *peaks))
        (plan, *_) = remat.plans(model)
        report = {
            "equal": equal,
            "host_bytes": plan.host_bytes,
            "budget_bytes": plan.budget_bytes,
            "planned_bytes": plan.peak_bytes,
            "measured_bytes": _measured(model, ids, kind),
            "eager_bytes": _measured(eager, ids, kind),
            "trace": _trace(model, ids),
        }
        Path(f"{folder}/report.{rank}").write_text(json.dumps(report))


def _measured(model: nn.Module, ids: torch.Tensor, kind: str) -> int:
    """Return the smallest peak of some steps.

    A thread of gloo may hold what it has reduced a moment longer than the step. CPUs convert
    bf16 inside of kernels, in memory that plans of blocks do not count.
    """

    def step() -> None:
        model(ids).loss.backward()

    peaks: list[int] = []
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        peaks.append(measure_step(step).peak_bytes if kind == "bf16" else allocated_peak(step))
    return min(peaks) + sum(_own(p).nbytes for p in model.parameters()) + ids.nbytes


def _trace(model: nn.Module, ids: torch.Tensor) -> list[tuple[str, int, int]]:
    """Return the spans of FSDP2's all-gathers and of the backwards of planned blocks."""
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(ids).loss.backward()
    events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    return [
        (e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.name.startswith("FSDP::all_gather (")
        or e.name.endswith("evaluate_function: _StepFunctionBackward")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_blocks_train_as_under_fsdp2_within_the_budget(kind: str, tmp_path: Path) -> None:
    """Gradients are those of FSDP2 without remat."""
    mp.spawn(_worker, args=(kind, str(tmp_path)), nprocs=2)
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert report["equal"]
        assert (report["host_bytes"] > 0) == (kind == "offloaded")
        assert report["measured_bytes"] <= report["budget_bytes"]
        assert report["measured_bytes"] < 0.75 * report["eager_bytes"]
        assert report["planned_bytes"] <= report["budget_bytes"]
        if kind == "enabled first":
            _assert_overlap(report["trace"])


def _assert_overlap(trace: list[tuple[str, int, int]]) -> None:
    """Check that the next block is gathered while a block's backward runs."""
    backwards = [
        (start, end) for name, start, end in trace if name.endswith("_StepFunctionBackward")
    ]
    assert len(backwards) == 4
    for (start, end), following in zip(backwards, (2, 1, 0), strict=False):
        name = f"FSDP::all_gather (blocks.{following})"
        assert any(n == name and start < begun < end for n, begun, _ in trace)


STEPS = 10
MICRO_BATCHES: dict[str, tuple[int, ...]] = {
    "a new length in the micro-batch that reduces": (256, 256, 192),
    "five micro-batches": (256, 256, 192, 256, 224),
    "all parameters in blocks": (256, 256, 192),
}
"""The rows of the micro-batches of a step."""


class BlocksAlone(WithParts, blocks=lambda: nn.ModuleList(Block(32) for _ in range(4))):
    """Blocks without parameters outside of them: FSDP2's group of the root is empty."""

    def forward(self, ids: torch.Tensor) -> Output:
        x = nn.functional.one_hot(ids % 32, 32).float()
        for block in self.blocks:
            x = block(x)
        return Output(x.square().mean(), x)


def _accumulate(rank: int, case: str, folder: str) -> None:
    """Train with micro-batches of which the last one reduces gradients."""
    torch.set_num_threads(1)
    with _group(rank, f"{folder}/store"):
        torch.manual_seed(0)
        blocks = [Block(32) for _ in range(4)]
        model = BlocksAlone() if case == "all parameters in blocks" else Net(list(blocks))
        eager = copy.deepcopy(model)
        _shard(eager, "sharded first")
        expected, eager_peaks, _ = _accumulated(eager, rank, MICRO_BATCHES[case])
        options: dict[str, Any] = {"scope": "blocks", "outputs": "dropped"}
        remat.enable(model, "70%", costs=remat.Roofline("cpu"), **options)
        _shard(model, "sharded first")
        actual, peaks, planned = _accumulated(model, rank, MICRO_BATCHES[case])
        report = {
            "equal": len(actual) == len(expected) and all(map(torch.equal, actual, expected)),
            "eager_bytes": eager_peaks,
            "measured_bytes": peaks,
            "planned_bytes": planned,
            "budget_bytes": max(plan.budget_bytes for plan in remat.plans(model)),
        }
        Path(f"{folder}/report.{rank}").write_text(json.dumps(report))


def _accumulated(
    model: nn.Module, rank: int, rows: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Train, and return the losses and final weights, and the measured and planned peak of each
    micro-batch: the smallest of the last four steps, as in `_measured`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = torch.Generator().manual_seed(rank)
    losses: list[torch.Tensor] = []
    peaks_bytes: list[list[int]] = []
    planned_bytes: list[int] = []
    for train_step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(10 * train_step + rank)
        peaks_bytes.append([])
        planned_bytes.clear()
        for number, count in enumerate(rows):
            ids = torch.randint(0, 50, (count,), generator=samples)
            model.set_requires_gradient_sync(number == len(rows) - 1)  # type: ignore[operator]

            def one(ids: torch.Tensor = ids) -> None:
                loss = model(ids).loss
                loss.backward()
                losses.append(loss.detach())

            constants = [*map(_own, model.parameters()), ids, *unreduced_gradients(model)]
            peaks_bytes[-1].append(measure_step(one, constants).peak_bytes)
            if is_enabled(model):
                planned_bytes.append(remat.plans(model)[-1].peak_bytes)
        optimizer.step()
    weights = [_own(tensor) for tensor in model.state_dict().values()]
    smallest = [min(micro_batch) for micro_batch in zip(*peaks_bytes[-4:], strict=True)]
    return losses + weights, smallest, planned_bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", MICRO_BATCHES)
def test_micro_batches_of_many_lengths_accumulate_without_reduction(
    case: str, tmp_path: Path
) -> None:
    """Losses and weights after ten steps are those of FSDP2 without remat, and plans are used in
    all micro-batches."""
    mp.spawn(_accumulate, args=(case, str(tmp_path)), nprocs=2)
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert report["equal"]
        peaks = zip(report["measured_bytes"], report["planned_bytes"], strict=True)
        for measured_bytes, planned_bytes in peaks:
            assert 0.9 * planned_bytes <= measured_bytes <= planned_bytes
            assert planned_bytes <= report["budget_bytes"]
        assert max(report["measured_bytes"]) < 0.75 * max(report["eager_bytes"])


def test_one_process_can_shard_and_only_blocks_are_planned(tmp_path: Path) -> None:
    """A group of one process takes the same code. A sharded model is refused unless its scope is
    blocks."""
    with _group(0, f"{tmp_path}/store", size=1):
        torch.manual_seed(0)
        model = Net([Block(32) for _ in range(3)])
        eager = copy.deepcopy(model)
        _shard(model, "sharded first")
        whole_model = remat.enable(Net([Block(32)]), "70%", scope="model")
        _shard(whole_model, "sharded first")
        with pytest.raises(remat.TraceError, match=r"sharded already.*scope=\"blocks\""):
            whole_model(torch.randint(0, 50, (8,)))
        with pytest.raises(remat.TraceError, match=r"sharded already.*scope=\"blocks\""):
            remat.enable(model, "70%", scope="model")
        remat.enable(model, "70%", costs=remat.Roofline("cpu"))
        ids = torch.randint(0, 50, (512,))
        expected = step(eager, ids, 1).gradients
        for name, gradient in step(model, ids, 1).gradients.items():
            assert torch.equal(_own(gradient), expected[name])
        (plan,) = remat.plans(model)
        assert isinstance(plan, BlocksPlan)
        assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
        assert plan.not_whole_reason == "its parameters are sharded"
