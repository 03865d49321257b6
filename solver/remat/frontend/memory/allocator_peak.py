"""The peak of a step, read from torch's allocator of the CPU or a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.profiler


def cuda_peak(step: Callable[[], object], device: torch.device | str | int | None = None) -> int:
    """Run the step and return the peak of allocated bytes on a CUDA device, including memory
    allocated before the step. Call the step once before, so that libraries have their workspaces.

    Resets the device's peak statistics, like `torch.cuda.reset_peak_memory_stats`: torch can
    neither measure a peak separately from these, nor restore the old value.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def allocated_peak(step: Callable[[], object]) -> int:
    """Run the step and return the peak of the bytes that the CPU's allocator hands out, without
    memory allocated before the step. For steps that torch compiled: their operations cannot be
    intercepted. Includes the workspaces of kernels. Call the step once before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no log message when the profiler starts
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    kineto = profile.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events: list[Any] = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
