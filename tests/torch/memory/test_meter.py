"""The meter counts the storages that are counted by hand."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from remat.frontend.memory.meter import (
    LiveStorageMeter,
    cuda_peak,
    measure_step,
    memory_gauge,
    unique_bytes,
)

KIB = 1024


def test_storages_count_from_allocation_to_release() -> None:
    with LiveStorageMeter(constant_bytes=100) as meter:
        a = torch.zeros(256)
        assert meter.live_bytes == 100 + KIB
        b = a + 1
        assert meter.live_bytes == 100 + 2 * KIB
        del a
        assert meter.live_bytes == 100 + KIB
        c = b * 2
        assert meter.peak_bytes == 100 + 2 * KIB
    del b, c
    assert meter.live_bytes == 100


@pytest.mark.parametrize("kind", ["meta", "fake", "memory"])
def test_only_storages_with_memory_count_when_they_are_resized(kind: str) -> None:
    device = "meta" if kind == "meta" else "cpu"
    with LiveStorageMeter() as meter, FakeTensorMode() if kind == "fake" else nullcontext():
        storage = torch.empty(256, device=device).untyped_storage()
        storage.resize_(0)
        assert meter.live_bytes == 0
        storage.resize_(2 * KIB)
        assert meter.live_bytes == meter.peak_bytes == (2 * KIB if kind == "memory" else 0)


def test_views_and_in_place_operations_take_no_memory() -> None:
    before = torch.zeros(1024)
    with LiveStorageMeter() as meter:
        views = [before.view(32, 32), before[:4], before.detach(), *before.split(256)]
        before.add_(1)
        assert meter.live_bytes == 0
        a = torch.zeros(256)
        view = a.view(16, 16).t()
        a.mul_(2)
        assert meter.live_bytes == KIB
        del a
        assert meter.live_bytes == KIB, "a view keeps the whole storage"
        del view
        assert meter.live_bytes == 0
        assert len(views) == 7


def test_another_tensor_in_an_older_storage_takes_no_memory() -> None:
    """As the bytes of a tensor that a dry run writes into, which it restores afterwards."""
    older = torch.zeros(256)
    with LiveStorageMeter() as meter:
        memory = torch.empty(0, dtype=torch.uint8).set_(older.untyped_storage())
        assert meter.live_bytes == 0
        copy = memory.clone()
        assert meter.live_bytes == copy.nbytes == KIB


def test_manually_resized_storages_are_tracked() -> None:
    """As FSDP2 frees and fills its gathered storages, also those from before the step."""
    before = torch.zeros(64)
    with LiveStorageMeter() as meter:
        tensor = torch.zeros(128)
        tensor.untyped_storage().resize_(0)
        assert (meter.live_bytes, meter.peak_bytes) == (0, 512)
        tensor.untyped_storage().resize_(512)
        before.untyped_storage().resize_(0)
        assert meter.live_bytes == 512 - 256
        del tensor
        assert meter.live_bytes == -256
    before.untyped_storage().resize_(256)
    assert meter.live_bytes == -256


def test_tuples_resizes_and_reused_addresses_are_tracked() -> None:
    with LiveStorageMeter() as meter:
        values, indices = torch.zeros(256).max(dim=0, keepdim=True)
        assert meter.live_bytes == 4 + 8
        values.resize_(256)
        assert meter.live_bytes == KIB + 8
        del values, indices
        for _ in range(100):
            torch.zeros(256)
        assert meter.live_bytes == 0
    assert meter.peak_bytes == KIB + 12, "while max ran, its input and both results were live"


def test_the_peak_of_a_linear_layer_is_the_one_counted_by_hand() -> None:
    layer = torch.nn.Linear(32, 16)
    x = torch.randn(8, 32)

    def step() -> None:
        layer(x).sum().backward()

    step()
    layer.zero_grad(set_to_none=True)
    constants = [*layer.parameters(), x]
    use = measure_step(step, constants, flops=True)
    base = (32 * 16 + 16 + 8 * 32) * 4
    gradients = (32 * 16 + 16) * 4
    assert unique_bytes(constants) == base
    assert use.remaining_bytes == base + gradients
    # The loss and its gradient (a scalar each), and both gradients; y is gone: sum saves no value.
    assert use.peak_bytes >= base + gradients
    assert use.peak_bytes <= base + gradients + 8 * 16 * 4 + 8
    assert use.flops == 2 * (2 * 8 * 32 * 16)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        scratch = torch.zeros(10 * KIB)
        return grads[0] * 2 * x + scratch.sum()


def test_operations_inside_a_custom_function_are_seen_in_both_directions() -> None:
    x = torch.randn(256, requires_grad=True)
    with LiveStorageMeter() as meter:
        loss = Square.apply(x).sum()  # type: ignore[union-attr]
        assert meter.peak_bytes == KIB + 4
        meter.reset_peak()
        loss.backward()
        assert meter.peak_bytes > 40 * KIB
        assert meter.live_bytes == 4 + KIB
    assert x.grad is not None


def test_nothing_is_leaked_by_a_training_loop() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with LiveStorageMeter() as meter:
        seen = []
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
            model.zero_grad(set_to_none=True)
            gc.collect()
            seen.append(meter.live_bytes)
    assert seen == [0] * 5


def test_flops_agree_with_torch() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()
    )
    x = torch.randn(2, 3, 8, 8)
    meter = LiveStorageMeter(count_flops=True)
    with FlopCounterMode(display=False) as counter, meter:
        model(x).sum().backward()
    assert meter.flops == counter.get_total_flops() > 0


@pytest.mark.gpu
def test_cuda_peak_includes_memory_allocated_before() -> None:
    resident = torch.zeros(KIB, device="cuda")
    before = torch.cuda.memory_allocated()
    peak_bytes = cuda_peak(lambda: torch.zeros(1 << 20, device="cuda"))
    # Up to a mebibyte of an existing block is not split off.
    assert before + (1 << 22) <= peak_bytes <= before + (1 << 22) + (1 << 20)
    assert resident.is_cuda


@pytest.mark.gpu
def test_a_gauge_is_created_once_autograds_thread_holds_no_gradients() -> None:
    """Without the wait, a few of these differences equal the bytes of the gradients."""
    layer, device = nn.Linear(256, 256, device="cuda"), torch.device("cuda")

    def held_bytes() -> int:
        x = torch.randn(64, 256, device=device)
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
        with memory_gauge(device) as measured:
            assert measured.live() == 0
        return torch.cuda.memory_allocated() - before

    held_bytes()  # cuBLAS allocates its workspace
    assert {held_bytes() for _ in range(1000)} == {0}
