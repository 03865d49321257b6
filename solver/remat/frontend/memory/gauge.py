"""Memory gauges: live bytes and their peak on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from remat.frontend.memory.meter import LiveStorageMeter


class Gauge(Protocol):
    """Reads the bytes that were allocated since the gauge was created."""

    def live(self) -> int:
        """Return the live bytes."""
        ...

    def peak(self) -> int:
        """Return the peak of the live bytes since the last call of this method, and reset it."""
        ...


class _CpuGauge:
    """A memory gauge that reads a `LiveStorageMeter`."""

    def __init__(self, meter: LiveStorageMeter) -> None:
        self._meter = meter

    def live(self) -> int:
        return self._meter.live_bytes

    def peak(self) -> int:
        peak_bytes = self._meter.peak_bytes
        self._meter.reset_peak()
        return peak_bytes


class _CudaGauge:
    """A memory gauge that reads the statistics of torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._initial_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._initial_bytes

    def peak(self) -> int:
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._initial_bytes
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes


@contextmanager
def gauge(device: torch.device) -> Iterator[Gauge]:
    """Yield a memory gauge for the operations inside of this context. On CUDA, it resets the
    device's peak statistics."""
    if device.type == "cuda":
        wait_for_autograd(device)
        yield _CudaGauge(device)
        return
    with LiveStorageMeter() as meter:
        yield _CpuGauge(meter)


def wait_for_autograd(device: torch.device) -> None:
    """Wait until autograd's thread of a GPU has released the results of the last backward.

    The thread may do so some milliseconds after the call that computed them has returned, while
    something else is measured. It always does so before it starts the next backward: this runs one
    of a tensor without elements.
    """
    if device.type != "cuda":
        return
    with torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf, torch.empty(0, device=device))
