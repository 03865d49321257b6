"""Measurements that differ between a GPU and a CPU: memory, time, memory limits, CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from remat.frontend.memory.meter import measure_step

Step = Callable[[], object]


@dataclass(frozen=True)
class StepPeaks:
    """Peaks of one step in bytes, including everything that was allocated before it.

    On a CPU, only the requested bytes are known: the bytes of live storages.
    """

    requested_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None


def is_cuda(device: torch.device) -> bool:
    """True if `device` is a CUDA device."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait for all launched kernels of a GPU. Does nothing on a CPU."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


def free_unused_memory(device: torch.device) -> None:
    """Free unreachable Python objects and the allocator's cached blocks."""
    gc.collect()
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def measure_peaks(step: Step, device: torch.device, constants: list[torch.Tensor]) -> StepPeaks:
    """Run a step and return its peaks. `constants` are the parameters, buffers and batch."""
    if not is_cuda(device):
        return StepPeaks(measure_step(step, constants).peak_bytes)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return StepPeaks(
        stats["requested_bytes.all.peak"],
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
        stats["num_alloc_retries"] - before["num_alloc_retries"],
    )


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that are allocated now on a GPU; 0 for a CPU, where they are not known."""
    return torch.cuda.memory_allocated(device) if is_cuda(device) else 0


def interleaved_step_times(
    steps_by_name: Mapping[str, Step], device: torch.device, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds of each step function in each round, as the mean over `steps` calls.

    The functions take turns, and their order rotates by one each round. An extra first round warms
    up. GPU times are taken between two CUDA events.
    """
    times: dict[str, list[float]] = {name: [] for name in steps_by_name}
    names = list(steps_by_name)
    gc.collect()
    gc.disable()
    try:
        for round_index in range(-1, rounds):
            first = round_index % len(names)
            for name in (*names[first:], *names[:first]):
                seconds = _mean_step_s(steps_by_name[name], device, steps)
                if round_index >= 0:
                    times[name].append(seconds)
    finally:
        gc.enable()
    return times


def _mean_step_s(step: Step, device: torch.device, steps: int) -> float:
    """Return the mean seconds of `steps` consecutive steps."""
    if not is_cuda(device):
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start_s) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / steps


@contextlib.contextmanager
def memory_limit(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """Limit the bytes that torch's allocator may reserve on a GPU. Does nothing on a CPU."""
    if not is_cuda(device):
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def make_cuda_graphs(
    module: nn.Module, args: tuple[torch.Tensor, ...], device: torch.device
) -> nn.Module:
    """Return the module with forward and backward as CUDA graphs; unchanged on a CPU."""
    if not is_cuda(device):
        return module
    return torch.cuda.make_graphed_callables(module, args)  # type: ignore[return-value]


def use_deterministic_kernels(device: torch.device) -> None:
    """Seed the generator and select deterministic kernels: no TF32, no tuning."""
    torch.manual_seed(0)
    if not is_cuda(device):
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
