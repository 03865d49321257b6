"""Peaks, FLOPs and interleaved step times."""

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
from remat.frontend.memory.allocator_peak import allocated_peak, cuda_peak
from remat.frontend.memory.meter import measure_step, unique_bytes


@dataclass(frozen=True)
class StepUsage:
    """What one warm step takes. FLOPs are of matrix products and convolutions."""

    peak_bytes: int
    flops: int | None


def measure_usage(method: Method, workload: Workload, device: torch.device) -> StepUsage:
    """Peak of allocated bytes, with parameters, buffers, gradients and batch, and FLOPs.

    On the CPU, of live storages. The meter cannot see into what torch has compiled (dynamo steps
    aside under it), so that is asked of the allocator; it counts kernels' scratch memory too. On
    CUDA `max_memory_allocated` after warm-up, less what others (library workspaces) hold at rest.
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
    own = sum(-(-unique_bytes([t]) // CUDA_ALIGNMENT_BYTES) for t in constants)
    foreign = torch.cuda.memory_allocated(device) - own * CUDA_ALIGNMENT_BYTES
    return StepUsage(cuda_peak(lambda: run_step(module, workload), device) - foreign, flops)


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, as torch's allocator on CUDA does: else it returns each large
    block to the system, and a step pays for its memory anew, page by page. False where there is no
    glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    largest_mapped, trim_at = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    return bool(mallopt(largest_mapped, 0)) and bool(mallopt(trim_at, -1))


def resident_tensors(workload: Workload) -> list[torch.Tensor]:
    """The tensors that are there before the step, one for each storage."""
    batch = [t for t in workload.batch.values() if isinstance(t, torch.Tensor)]
    found = [*workload.model.parameters(), *workload.model.buffers(), *batch]
    return list({t.untyped_storage()._cdata: t for t in found}.values())


def interleaved_step_times(
    methods: list[Method], workload: Workload, device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Step times in seconds, A B C A B C ...: what else the machine does, it does to all. The
    order turns by one each round, so that nobody always follows the same neighbour."""
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    for number in range(-1, rounds):
        at = number % len(methods)
        for method in (*methods[at:], *methods[:at]):
            assert method.module is not None
            workload.model.zero_grad(set_to_none=True)
            gc.collect()
            _synchronize(device)
            began = time.perf_counter()
            run_step(method.module, workload)
            _synchronize(device)
            if number >= 0:  # the first round warms up
                times[method.name].append(time.perf_counter() - began)
    return times


def time_summary(times: dict[str, list[float]], name: str) -> dict[str, float | int | list[float]]:
    """Minimum and median, and the same of the ratios to eager's step of the same round."""
    own = times[name]
    ratios = [a / b for a, b in zip(own, times["eager"], strict=True)]
    return {
        "step_s_median": statistics.median(own),
        "step_s_min": min(own),
        "time_ratio_median": statistics.median(ratios),
        "time_ratio_of_mins": min(own) / min(times["eager"]),
        "runs": len(own),
        "step_s": own,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
