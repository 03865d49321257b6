"""Offloading on a GPU: numbers, memory, and pinned memory that is reused.

On the software GPU with `REMAT_SOFTWARE_GPU_LATE_COPIES=1`, copies are done as late as events
allow, so that a missing wait gives wrong numbers.
"""

from __future__ import annotations

import copy
import gc
import os

import pytest
import torch
from tests.helpers.training.block_models import Block, plan_of, step
from tests.helpers.training.block_models import Net as BlocksNet
from tests.helpers.training.offloaded_steps import Net, offloaded
from torch import nn

import remat
from remat.costs.devices import Link
from remat.documents.targets import OFFLOAD_TARGET
from remat.documents.trace import Trace
from remat.frontend.runtime import pinned_memory as pinned
from remat.frontend.runtime.pinned_memory import PinnedChunks, PinnedMemory, pinned_memory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LINK = Link(5e10, 5e10)


def traces() -> tuple[nn.Module, torch.Tensor, Trace, Trace]:
    torch.manual_seed(0)
    model, x = Net().to(CUDA), torch.randn(64, 32, device=CUDA)
    plain = remat.measure(remat.trace(model, x), remat.Roofline("h100"))
    trace = offloaded(plain, LINK)
    assert any(node.target == OFFLOAD_TARGET for node in trace.nodes)
    return model, x, plain, trace


def lowered(trace: Trace, model: nn.Module) -> nn.Module:
    schedule = remat.Schedule.keep_all(trace.graph())
    return remat.lower(remat.rewrite(trace, schedule), copy.deepcopy(model))


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    module(x).backward()
    torch.cuda.synchronize()
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_offloaded_steps_have_the_numbers_of_those_that_are_not() -> None:
    model, x, plain, trace = traces()
    reference, module = lowered(plain, model), lowered(trace, model)
    for _ in range(3):
        for expected, gradient in zip(run(reference, x), run(module, x), strict=True):
            assert torch.equal(expected, gradient)


@pytest.mark.skipif(
    "REMAT_SOFTWARE_GPU_LATE_COPIES" not in os.environ, reason="copies may happen to be in time"
)
@pytest.mark.parametrize("fault", ["release", "arrive", "all"])
def test_a_missing_wait_gives_wrong_numbers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plain, trace = traces()
    expected = run(lowered(plain, model), x)
    module = lowered(trace, model)
    if fault == "release":
        monkeypatch.setattr(
            PinnedMemory, "wait", lambda self, number: setattr(self._slot(number), "source", None)
        )
    elif fault == "arrive":
        monkeypatch.setattr(pinned.StreamCopy, "wait", lambda self: None)
    else:
        monkeypatch.setattr(pinned, "_wait_for_event", lambda stream, event: None)
    gradients = run(module, x)
    assert not all(map(torch.equal, expected, gradients))


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_the_allocator_peaks_as_predicted(budget: str) -> None:
    model, x, _, trace = traces()
    plan = remat.solve(trace, budget, remat.Auto(time_limit=3))
    module = remat.lower(remat.rewrite(trace, plan.schedule), model)
    for _ in range(2):
        run(module, x)
        module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    run(module, x)
    assert torch.cuda.max_memory_allocated() <= plan.peak_bytes + (1 << 20)


def test_pinned_memory_is_reused() -> None:
    model, x, _, trace = traces()
    module = lowered(trace, model)
    run(module, x)
    memory = pinned_memory(CUDA)
    pinned_bytes = memory.pinned_bytes
    for _ in range(3):
        run(module, x)
        gc.collect()
        assert memory.used_bytes == 0
    assert memory.pinned_bytes == pinned_bytes > 0


def test_optimize_offloads_on_a_gpu() -> None:
    model, x, _, _ = traces()
    reference = run(copy.deepcopy(model), x)
    costs = remat.Roofline("h100")
    module = remat.optimize(model, "95%", x, costs=costs, link=LINK, offload="auto", split="off")
    assert all(map(torch.equal, reference, run(module, x)))


def test_a_step_that_fails_leaves_nothing() -> None:
    model, x, plain, trace = traces()
    module = lowered(trace, model)
    for _ in range(2):
        loss = module(x)
        loss.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    gc.collect()
    assert pinned_memory(CUDA).used_bytes == 0
    assert all(map(torch.equal, run(lowered(plain, model), x), run(module, x)))


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_a_cuda_graph_replays_the_copies() -> None:
    model, x, _, _ = traces()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    plain = remat.measure(remat.trace(model, x), remat.Roofline("h100"))
    trace = offloaded(plain, LINK)
    reference, module = lowered(plain, model), lowered(trace, model)
    expected = run(reference, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            module(x).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    module.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        module(x).backward()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for p, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_memory_that_cannot_be_pinned_is_an_error_that_says_so() -> None:
    with pytest.raises(remat.RematError, match=r"cannot pin .* pass a smaller host_budget"):
        PinnedChunks().take(1 << 60)


def test_plans_of_blocks_offload() -> None:
    torch.manual_seed(0)
    model = BlocksNet([Block(64) for _ in range(6)], 64).to(CUDA)
    ids = torch.randint(0, 50, (4096,), device=CUDA)
    expected = step(model, ids, 1)
    remat.enable(
        model, "45%", (ids,), scope="blocks", outputs="dropped", costs=remat.Roofline("h100"),
        offload="auto", link=Link(1e12, 1e12), strategy=remat.Auto(time_limit=0.1),
    )  # fmt: skip
    assert plan_of(model).host_bytes > 0
    for _ in range(3):
        actual = step(model, ids, 1)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(actual[1][name], gradient)
    gc.collect()
    assert pinned_memory(CUDA).used_bytes == 0
