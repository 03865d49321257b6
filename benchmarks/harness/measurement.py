"""Measurement of peaks, FLOPs and interleaved step times."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.harness.methods import Method, run_step
from benchmarks.models.workloads import Workload
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.memory.meter import allocated_peak, cuda_peak, measure_step, unique_bytes


@dataclass(frozen=True)
class StepUsage:
    """Peak bytes and FLOPs of one warm step. FLOPs are those of matmuls and convolutions."""

    peak_bytes: int
    flops: int | None


def measure_usage(method: Method, workload: Workload, device: torch.device) -> StepUsage:
    """Return the peak of a step with parameters, buffers, gradients and batch, and its FLOPs.

    On the CPU, the peak is that of live storages. The meter cannot see into compiled code, because
    dynamo skips compilation under a dispatch mode; there the allocator's peak is read, which also
    counts the scratch memory of kernels. On CUDA, the peak is `max_memory_allocated` after warm-up,
    without the bytes that other users (library workspaces) hold between steps.
    """
    module = method.module
    assert module is not None
    constants = resident_tensors(workload)
    run_step(module, workload)
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    compiled = "backend" in method.facts
    if device.type != "cuda" and compiled:
        return StepUsage(
            allocated_peak(lambda: run_step(module, workload)) + unique_bytes(constants), None
        )
    flops = None
    if not compiled:
        metered = measure_step(lambda: run_step(module, workload), constants, flops=True)
        flops = metered.flops
        if device.type != "cuda":
            return StepUsage(metered.peak_bytes, flops)
    run_step(module, workload)
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize(device)
    constant_blocks = sum(-(-unique_bytes([t]) // CUDA_ALIGNMENT_BYTES) for t in constants)
    constant_bytes = constant_blocks * CUDA_ALIGNMENT_BYTES
    other_bytes = torch.cuda.memory_allocated(device) - constant_bytes
    return StepUsage(cuda_peak(lambda: run_step(module, workload), device) - other_bytes, flops)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in the process, as torch's CUDA allocator does.

    By default glibc returns each large block to the system, and each step pays for the page faults
    of its memory. Return False if the process does not use glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    largest_mapped, trim_at = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    return bool(mallopt(largest_mapped, 0)) and bool(mallopt(trim_at, -1))


def resident_tensors(workload: Workload) -> list[torch.Tensor]:
    """Return the parameters, buffers and batch of a workload, one tensor for each storage."""
    batch = [t for t in workload.batch.values() if isinstance(t, torch.Tensor)]
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *batch]
    return list({t.untyped_storage()._cdata: t for t in tensors}.values())


def interleaved_step_times(
    methods: list[Method], workload: Workload, device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Return the step times of each method in seconds; the methods take turns, A B C A B C ...

    So other load of the machine affects all methods alike. The order rotates by one each round, so
    that no method always follows the same one. An extra first round warms up.
    """
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    for round_index in range(-1, rounds):
        first = round_index % len(methods)
        for method in (*methods[first:], *methods[:first]):
            assert method.module is not None
            workload.model.zero_grad(set_to_none=True)
            gc.collect()
            _synchronize(device)
            began = time.perf_counter()
            run_step(method.module, workload)
            _synchronize(device)
            if round_index >= 0:
                times[method.name].append(time.perf_counter() - began)
    return times


def time_summary(times: dict[str, list[float]], name: str) -> dict[str, float | int | list[float]]:
    """Return minimum and median of a method's step times, and of their ratios to eager's.

    A ratio compares two steps of the same round.
    """
    step_s = times[name]
    ratios = [a / b for a, b in zip(step_s, times["eager"], strict=True)]
    return {
        "step_s_median": statistics.median(step_s),
        "step_s_min": min(step_s),
        "time_ratio_median": statistics.median(ratios),
        "time_ratio_of_mins": min(step_s) / min(times["eager"]),
        "runs": len(step_s),
        "step_s": step_s,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
