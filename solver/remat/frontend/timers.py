"""How long one call takes and how much memory it needs besides its operands.

The median over blocks of calls, after a warm-up: about 20 ms for each operation, or three calls
where one takes more than 50 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from remat.frontend.cost_cache import Cost
from remat.pricing import FLOOR_S

TARGET_S = 0.02
SLOW_S = 0.05
BLOCK_S = 1e-3
SLOW_RUNS = 3

Run = Callable[[], object]


def timer_for(device: torch.device) -> Callable[[Run], Cost]:
    """`time_cpu`, or `time_cuda` on that device."""
    if device.type == "cpu":
        return time_cpu
    return lambda run: time_cuda(run, device)


def time_cpu(run: Run) -> Cost:
    """Median wall-clock seconds of a call. The workspace is 0: torch does not report what CPU
    kernels allocate inside themselves, and no peak that can be measured on CPU contains it."""
    sizes = output_bytes(run())

    def block(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    return Cost(_median(block), 0, sizes)


def output_bytes(result: object) -> tuple[int, ...]:
    """Bytes of the storage of each element that an operation returns; 0 for what is no tensor."""
    items = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(
        item.untyped_storage().nbytes() if isinstance(item, torch.Tensor) else 0 for item in items
    )


def time_cuda(run: Run, device: torch.device) -> Cost:
    """Median seconds of a call by CUDA events, and the bytes it holds only while it runs: its peak,
    less inputs and outputs, as the caching allocator counts them (multiples of 512).

    A kernel that is shorter than its launch from Python costs as much as the launch, as it does in
    a step that runs eagerly."""
    with torch.cuda.device(device):
        run()  # lazy initialisation: libraries' own workspaces, autotuning
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        after = torch.cuda.memory_allocated(device)
        sizes = output_bytes(result)
        del result

        def block(calls: int) -> float:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return Cost(_median(block), max(0, peak - max(before, after)), sizes)


def _median(block: Callable[[int], float]) -> float:
    once = block(1)
    if once > SLOW_S:
        times = [once] + [block(1) for _ in range(SLOW_RUNS - 1)]
        return max(FLOOR_S, statistics.median(times))
    calls = max(1, round(BLOCK_S / max(once, FLOOR_S)))
    calls = min(calls, 1000)
    blocks = max(SLOW_RUNS, min(50, round(TARGET_S / max(once * calls, BLOCK_S / 10))))
    return max(FLOOR_S, statistics.median(block(calls) / calls for _ in range(blocks)))
