"""Bytes that are allocated now, and the most since the last look, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from remat.frontend.memory.meter import LiveStorageMeter


class Gauge(Protocol):
    """Counts what is allocated beyond what was there when it began."""

    def live(self) -> int:
        """Bytes now."""
        ...

    def peak(self) -> int:
        """The most since the last call of this; it begins anew."""
        ...


class _OnCpu:
    def __init__(self, meter: LiveStorageMeter) -> None:
        self._meter = meter

    def live(self) -> int:
        return self._meter.live_bytes

    def peak(self) -> int:
        found = self._meter.peak_bytes
        self._meter.reset_peak()
        return found


class _OnCuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        found = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return found


@contextmanager
def gauge(device: torch.device) -> Iterator[Gauge]:
    """For what runs inside of the context. On CUDA it resets the device's peak statistics."""
    if device.type == "cuda":
        yield _OnCuda(device)
        return
    with LiveStorageMeter() as meter:
        yield _OnCpu(meter)
