"""Timers: the time of one call, and the memory that it needs in addition to its operands.

Calls are timed in blocks, after a warm-up: for about 20 ms in total, or three calls, on the CPU
with the warm-up, if one takes more than 50 ms. On the CPU the fastest block counts, since
concurrent processes only add time, and there are no more blocks once several agree with it; on
CUDA, which runs nothing else, the median.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from remat.costs.trace_costs import MIN_COST_S
from remat.frontend.common.garbage_collection import cycles_not_collected
from remat.frontend.costs.cost_cache import MeasuredCost

MEASUREMENT_S = 0.02
"""The total time of all blocks, approximately."""
SLOW_CALL_S = 0.05
"""Calls that take longer are timed one by one."""
MIN_BLOCK_S = 1e-3
"""The time of one block, approximately."""
MIN_BLOCKS = 3
AGREEMENT = 1.03
"""On the CPU, a block agrees with the fastest one if it takes up to this factor of its time."""
AGREED_S = 5e-3
"""On the CPU, timing ends once two or more blocks agree that take this time together."""
MAX_LAUNCHES_PER_BLOCK = 200
"""Upper limit of the calls in a block on CUDA: from some 1,000 pending launches on, the CPU waits
for the device."""
INITIAL_DELAY_S = 1e-3
MAX_DELAY_S = 0.07
GPU_CYCLES_PER_S = 2e9
"""The clock of a GPU, approximately: only the length of a delay depends on it."""

KernelCall = Callable[[], object]
"""A function that runs one operation on fixed operands."""


def measure_on_cpu(call: KernelCall) -> MeasuredCost:
    """Return the wall-clock seconds of a call in the fastest block, and its outputs' bytes. The
    workspace is 0: torch does not report what CPU kernels allocate internally, and no measured CPU
    peak contains it."""
    start = time.perf_counter()
    result = call()
    warm_up_s = time.perf_counter() - start
    sizes = output_storage_bytes(result)
    del result  # or each further call allocates its outputs elsewhere

    def block(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    cost_s = _seconds_per_call(block, min, warm_up_s=warm_up_s, is_enough=_agree)
    return MeasuredCost(cost_s, 0, sizes)


def _agree(block_times_s: Sequence[float]) -> bool:
    """True if several of these blocks of equally many calls take as long as the fastest one."""
    limit_s = AGREEMENT * min(block_times_s)
    agreeing = [block_s for block_s in block_times_s if block_s <= limit_s]
    return len(agreeing) > 1 and sum(agreeing) >= AGREED_S


def output_storage_bytes(result: object) -> tuple[int, ...]:
    """Return the storage bytes of each item that an operation returns; 0 for items that are no
    tensors."""
    items = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(
        item.untyped_storage().nbytes() if isinstance(item, torch.Tensor) else 0 for item in items
    )


def measure_on_cuda(
    call: KernelCall, device: torch.device, other_calls: Sequence[KernelCall] = ()
) -> MeasuredCost:
    """Return the median seconds of a call on the device and on the CPU, its outputs' bytes, and its
    workspace. `other_calls` are the same call on other tensors: timing them in turn reads the
    operands from memory and not from the L2 cache."""
    with torch.cuda.device(device):
        workspace_bytes, sizes = measure_memory_on_cuda(call, device)
        call_cycle = itertools.cycle((call, *other_calls))
        launch_times_s: list[float] = []

        def block(calls: int) -> float:
            device_s, launch_s = _time_busy_block(call_cycle, calls, device)
            launch_times_s.append(launch_s / calls)
            return device_s

        cost_s = _seconds_per_call(block, statistics.median, MAX_LAUNCHES_PER_BLOCK)
        return MeasuredCost(cost_s, workspace_bytes, sizes, statistics.median(launch_times_s))


def measure_memory_on_cuda(call: KernelCall, device: torch.device) -> tuple[int, tuple[int, ...]]:
    """Return the workspace of a call and its outputs' bytes. The workspace is its peak without
    inputs and outputs, as the caching allocator counts (multiples of 512 bytes)."""
    call()  # lazy initialisation: workspaces of libraries, autotuning
    torch.cuda.synchronize(device)
    # With the tensors of a freed cycle, the call's outputs would count as its workspace.
    with cycles_not_collected():
        bytes_before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        bytes_after = torch.cuda.memory_allocated(device)
    return max(0, peak_bytes - max(bytes_before, bytes_after)), output_storage_bytes(result)


def _time_busy_block(
    call_cycle: Iterator[KernelCall], calls: int, device: torch.device
) -> tuple[float, float]:
    """Return the seconds of the device and of the CPU for a number of calls.

    A delay kernel keeps the device busy until all calls are launched, so that it never waits for a
    launch between the two events.
    """
    delay_s = INITIAL_DELAY_S
    while True:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(delay_s * GPU_CYCLES_PER_S))
        start.record()
        launch_start = time.perf_counter()
        for _ in range(calls):
            next(call_cycle)()
        launch_s = time.perf_counter() - launch_start
        is_launched_in_time = not start.query()
        end.record()
        end.synchronize()
        # An operation that waits for the device is never launched in time.
        if is_launched_in_time or delay_s >= MAX_DELAY_S:
            return start.elapsed_time(end) / 1e3, launch_s
        delay_s *= 4


def _seconds_per_call(
    time_block: Callable[[int], float],
    average: Callable[[Iterable[float]], float],
    max_calls: int = 1000,
    *,
    warm_up_s: float | None = None,
    is_enough: Callable[[Sequence[float]], bool] = lambda block_times_s: False,
) -> float:
    """Return the `average` of the seconds per call over several blocks of calls.

    `time_block` runs a block with a number of calls and returns its seconds. No more blocks are run
    once `is_enough` is True for the seconds of those so far. The warm-up counts as one of them for
    calls of more than 50 ms.
    """
    first_call_s = time_block(1)
    if first_call_s > SLOW_CALL_S:
        calls, blocks = 1, MIN_BLOCKS
    else:
        calls = max(1, round(MIN_BLOCK_S / max(first_call_s, MIN_COST_S)))
        calls = min(calls, max_calls)
        total_blocks = round(MEASUREMENT_S / max(first_call_s * calls, MIN_BLOCK_S / 10))
        blocks = max(MIN_BLOCKS, min(50, total_blocks))
    block_times_s: list[float] = []
    if calls == 1:
        block_times_s = [first_call_s]
    if first_call_s > SLOW_CALL_S and warm_up_s is not None:
        block_times_s.append(warm_up_s)
    while len(block_times_s) < blocks and not (block_times_s and is_enough(block_times_s)):
        block_times_s.append(time_block(calls))
    return max(MIN_COST_S, average(block_s / calls for block_s in block_times_s))
