"""What differs between a GPU and a CPU in measuring: memory, time, limits, graphs."""

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
    """Of one step, with everything that was there before, in bytes. A CPU's allocator tells only
    what live storages take, and that is what is requested."""

    requested_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None


def is_cuda(device: torch.device) -> bool:
    """Whether it is a GPU."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait for what was launched."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


def free_unused_memory(device: torch.device) -> None:
    """Drop what nobody holds, in Python and in the allocator."""
    gc.collect()
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def measure_peaks(step: Step, device: torch.device, constants: list[torch.Tensor]) -> StepPeaks:
    """Run a step and read its peaks. `constants` are parameters, buffers and batch."""
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
    """What is allocated now; nothing is known of a CPU."""
    return torch.cuda.memory_allocated(device) if is_cuda(device) else 0


def interleaved_step_times(
    steps_by_name: Mapping[str, Step], device: torch.device, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of a step: the mean of `steps` between two events, one for each round. Sides take
    turns, and the order turns by one each round; a first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in steps_by_name}
    names = list(steps_by_name)
    gc.collect()
    gc.disable()
    try:
        for number in range(-1, rounds):
            at = number % len(names)
            for name in (*names[at:], *names[:at]):
                seconds = _seconds(steps_by_name[name], device, steps)
                if number >= 0:
                    found[name].append(seconds)
    finally:
        gc.enable()
    return found


def _seconds(step: Step, device: torch.device, steps: int) -> float:
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
    """torch's allocator takes no more from the device than this. A CPU has no such limit."""
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
    """Forward and backward as CUDA graphs; on a CPU the module as it is."""
    if not is_cuda(device):
        return module
    return torch.cuda.make_graphed_callables(module, args)  # type: ignore[return-value]


def use_deterministic_kernels(device: torch.device) -> None:
    """Kernels that round the same way each time: no TF32, no tuning. A CPU's do."""
    torch.manual_seed(0)
    if not is_cuda(device):
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
