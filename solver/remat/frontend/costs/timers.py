"""How long one call takes and how much memory it needs besides its operands.

Over blocks of calls, after a warm-up: about 20 ms for each operation, or three calls where one
takes more than 50 ms. On the CPU the fastest block, since what runs beside only adds; on CUDA,
where nothing does, the median.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from remat.costs.pricing import FLOOR_S
from remat.frontend.costs.cache import Cost

TARGET_S = 0.02
SLOW_S = 0.05
BLOCK_S = 1e-3
SLOW_RUNS = 3
MOST_LAUNCHES = 200
"""In one block on CUDA: where some 1,000 launches wait, the CPU waits as well."""
FIRST_WAIT_S = 1e-3
LONGEST_WAIT_S = 0.07
CYCLES_PER_S = 2e9
"""About, of a GPU's clock: only the length of a wait depends on it."""

Run = Callable[[], object]


def time_cpu(run: Run) -> Cost:
    """Wall-clock seconds of a call. The workspace is 0: torch does not report what CPU
    kernels allocate inside themselves, and no peak that can be measured on CPU contains it."""
    sizes = output_bytes(run())

    def block(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    return Cost(_of_blocks(block, min), 0, sizes)


def output_bytes(result: object) -> tuple[int, ...]:
    """Bytes of the storage of each element that an operation returns; 0 for what is no tensor."""
    items = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(
        item.untyped_storage().nbytes() if isinstance(item, torch.Tensor) else 0 for item in items
    )


def time_cuda(run: Run, device: torch.device, others: Sequence[Run] = ()) -> Cost:
    """Median seconds of a call on the device and on the CPU, and the bytes it holds only while it
    runs: its peak, less inputs and outputs, as the caching allocator counts them (multiples of
    512). `others` are the same call on other tensors, for operands that come from memory and not
    from the cache."""
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
        runs = itertools.cycle((run, *others))
        launches: list[float] = []

        def block(calls: int) -> float:
            device_s, launch_s = _busy_block(runs, calls, device)
            launches.append(launch_s / calls)
            return device_s

        cost_s = _of_blocks(block, statistics.median, MOST_LAUNCHES)
        workspace_bytes = max(0, peak - max(before, after))
        return Cost(cost_s, workspace_bytes, sizes, statistics.median(launches))


def _busy_block(runs: Iterator[Run], calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds of the device and of the CPU for this many calls. The device is kept busy until all
    are launched, so that it never waits for a launch between the two events."""
    wait_s = FIRST_WAIT_S
    while True:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(wait_s * CYCLES_PER_S))
        start.record()
        began = time.perf_counter()
        for _ in range(calls):
            next(runs)()
        launch_s = time.perf_counter() - began
        in_time = not start.query()
        end.record()
        end.synchronize()
        if in_time or wait_s >= LONGEST_WAIT_S:  # an operation that waits for the device never is
            return start.elapsed_time(end) / 1e3, launch_s
        wait_s *= 4


def _of_blocks(
    block: Callable[[int], float],
    pick: Callable[[Iterable[float]], float],
    most_calls: int = 1000,
) -> float:
    once = block(1)
    if once > SLOW_S:
        times = [once] + [block(1) for _ in range(SLOW_RUNS - 1)]
        return max(FLOOR_S, pick(times))
    calls = max(1, round(BLOCK_S / max(once, FLOOR_S)))
    calls = min(calls, most_calls)
    blocks = max(SLOW_RUNS, min(50, round(TARGET_S / max(once * calls, BLOCK_S / 10))))
    return max(FLOOR_S, pick(block(calls) / calls for _ in range(blocks)))
