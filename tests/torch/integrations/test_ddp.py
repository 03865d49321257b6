"""`DistributedDataParallel` around an optimised module: two real processes over gloo."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.helpers.training.block_models import Block, Net
from tests.helpers.training.models import FAMILIES
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import remat


@contextmanager
def _group(rank: int, store: str) -> Iterator[None]:
    """Join as one of two processes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def _worker(rank: int, store: str, report: str) -> None:
    with _group(rank, store):
        torch.manual_seed(0)
        case = FAMILIES["bert"]()
        eager = copy.deepcopy(case.model)
        strategy = remat.Auto(gap=0.05, time_limit=5.0)
        gm = remat.optimize(case.model, "85%", costs=remat.Roofline("cpu"), strategy=strategy)
        torch.manual_seed(100 + rank)
        batch = torch.randint(0, 120, case.kwargs["input_ids"].shape)
        kwargs = {**case.kwargs, "input_ids": batch, "labels": batch}
        gradients = []
        for module in (eager, gm):
            wrapped = DistributedDataParallel(module)
            for _ in range(2):  # the second step accumulates into what the first left
                torch.manual_seed(7)
                wrapped(**kwargs).loss.backward()
            gradients.append(_gradients(module))
        equal = all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
        Path(f"{report}.{rank}").write_text(f"{equal} {len(gradients[0])}")


@pytest.mark.slow
def test_gradients_are_those_of_eager_ddp(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(str(tmp_path / "store"), str(tmp_path / "report")), nprocs=2)
    for rank in (0, 1):
        equal, count = (tmp_path / f"report.{rank}").read_text().split()
        assert equal == "True"
        assert int(count) > 10


def hash_of(program: remat.Program) -> str:
    return hashlib.sha256(program.to_json().encode()).hexdigest()


def _planned_once(rank: int, store: str, report: str) -> None:
    with _group(rank, store):
        torch.manual_seed(0)
        case = FAMILIES["bert"]()
        eager = copy.deepcopy(case.model)
        text = [""]
        if rank == 0:
            trace = remat.trace(case.model, case.args, case.kwargs)
            trace = remat.measure(trace, remat.Roofline("cpu"))
            plan = remat.solve(trace, "85%", remat.Auto(gap=0.05, time_limit=5.0))
            text = [remat.rewrite(trace, plan.schedule).to_json()]
        dist.broadcast_object_list(text)
        gm = remat.lower(remat.Program.from_json(text[0]), case.model)
        gradients = []
        for module in (eager, gm):
            wrapped = DistributedDataParallel(module)
            torch.manual_seed(7 + rank)
            wrapped(**case.kwargs).loss.backward()
            gradients.append(_gradients(module))
        equal = all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
        assert gm.program is not None
        Path(f"{report}.{rank}").write_text(f"{equal} {hash_of(gm.program)}")


@pytest.mark.slow
def test_all_ranks_have_the_same_plan(tmp_path: Path) -> None:
    mp.spawn(_planned_once, args=(str(tmp_path / "store"), str(tmp_path / "report")), nprocs=2)
    reports = {(tmp_path / f"report.{rank}").read_text() for rank in (0, 1)}
    assert len(reports) == 1
    assert reports.pop().startswith("True ")


def _block_by_block(rank: int, store: str, report: str) -> None:
    with _group(rank, store):
        torch.manual_seed(0)
        model = Net([Block(32) for _ in range(4)])
        eager = copy.deepcopy(model)
        remat.enable(model, "75%", scope="blocks", outputs="dropped", costs=remat.Roofline("cpu"))
        torch.manual_seed(100 + rank)
        ids = torch.randint(0, 50, (256,))
        log: list[str] = []

        def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            log.append("reduced")
            return allreduce_hook(dist.group.WORLD, bucket)

        reduce.__annotations__.clear()  # DDP compares annotations with types, and these are strings
        for number, block in enumerate(model.blocks):
            block.register_full_backward_hook(
                lambda *_, number=number: log.append(f"backward {number}")
            )
        gradients = []
        for module in (eager, model):
            wrapped = DistributedDataParallel(module, bucket_cap_mb=0.01)
            wrapped.register_comm_hook(None, reduce)
            for seed in (7, 8):
                log.clear()
                wrapped.zero_grad(set_to_none=True)
                torch.manual_seed(seed)
                wrapped(ids).loss.backward()
            gradients.append(_gradients(module))
        equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        (plan,) = remat.plans(model)
        within = plan.peak_bytes <= plan.budget_bytes
        Path(f"{report}.{rank}").write_text(f"{equal} {within} {','.join(log)}")


@pytest.mark.slow
def test_gradients_are_sent_while_earlier_blocks_still_compute(tmp_path: Path) -> None:
    mp.spawn(_block_by_block, args=(str(tmp_path / "store"), str(tmp_path / "report")), nprocs=2)
    for rank in (0, 1):
        equal, within, log = (tmp_path / f"report.{rank}").read_text().split(" ", 2)
        assert (equal, within) == ("True", "True")
        order = log.split(",")
        for later, earlier in (
            (3, 2),
            (2, 1),
            (1, 0),
        ):  # a block's gradients are sent before the next block's
            between = order[order.index(f"backward {later}") : order.index(f"backward {earlier}")]
            assert "reduced" in between
