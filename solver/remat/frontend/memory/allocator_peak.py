"""Peaks of a step as the device's allocator gave out memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.profiler


def cuda_peak(step: Callable[[], object], device: torch.device | str | int | None = None) -> int:
    """Peak of bytes allocated on a CUDA device while the step runs, what was there before
    included. Call the step once before, so that libraries have their workspaces.

    Resets the device's peak statistics, like `torch.cuda.reset_peak_memory_stats`: torch has no way
    to read a peak of its own, nor to put the old one back.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def allocated_peak(step: Callable[[], object]) -> int:
    """Peak of the bytes that the CPU's allocator gives out while the step runs, beyond what was
    there before: for steps that torch has compiled, in which no operation is seen. Scratch memory
    of kernels counts. Call the step once before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler would say that it starts
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
