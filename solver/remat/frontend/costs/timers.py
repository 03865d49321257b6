"""Times of operations: of one call, and of code that runs.

One call is timed in blocks of calls, after a warm-up: for about 20 ms in total, or three calls, on
the CPU with the warm-up, if one takes more than 50 ms. On the CPU the fastest block counts, since
concurrent processes only add time, and there are no more blocks once several agree with it; on
CUDA, which runs nothing else, the median.

A block of the model that cannot be captured is run under a `Stopwatch`. If the costs of the planned
blocks come from the roofline of another device, its time must come from there, too: times of two
devices must not be added.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.trace_costs import MIN_COST_S
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import DocumentError, TraceError
from remat.frontend.common.garbage_collection import cycles_not_collected
from remat.frontend.common.operators import argument_from_torch, tensor_meta, written_parameters
from remat.frontend.common.pytree import tensors_in
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

    cost_s = _seconds_per_call(block, min, warm_up_s=warm_up_s, is_enough=_block_times_agree)
    return MeasuredCost(cost_s, 0, sizes)


def _block_times_agree(block_times_s: Sequence[float]) -> bool:
    """True if several of these blocks of equally many calls take about as long as the fastest one,
    and together long enough."""
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
    """Return the seconds of the device and of the CPU for the next `calls` calls of a cycle.

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

    `time_block` runs a block with a number of calls, at most `max_calls`, and returns its seconds.
    No more blocks are run once `is_enough` is True for the seconds of the blocks so far.
    `warm_up_s`, the seconds of a call before, counts as a block if calls take more than 50 ms.
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


class Stopwatch(Protocol):
    """Gives the seconds of all operations since a fixed time."""

    def seconds(self) -> float:
        """Return the seconds so far."""
        ...


class _WallStopwatch:
    """The machine's clock, read after the GPUs are synchronized."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]

    def seconds(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()


class _RooflineStopwatch(TorchDispatchMode):
    """A dispatch mode that adds up the seconds of each operator, estimated by a roofline."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self._roofline = roofline
        self._seconds = 0.0

    def seconds(self) -> float:
        return self._seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            self._seconds += _operator_seconds(func, args, kwargs or {}, result, self._roofline)
        return result


@contextmanager
def stopwatch(roofline: Roofline | None, devices: Iterable[torch.device]) -> Iterator[Stopwatch]:
    """Yield a stopwatch for the operations inside of this context: of estimated seconds with a
    `roofline`, else of real seconds on these `devices`."""
    if roofline is None:
        yield _WallStopwatch(devices)
        return
    with _RooflineStopwatch(roofline) as roofline_stopwatch:
        yield roofline_stopwatch


def _operator_seconds(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    roofline: Roofline,
) -> float:
    """Return the seconds of one call of an operator, estimated by a roofline; zero for a view.

    If the call cannot be written as a `Node`, or a formula fails for it, return the time to read
    and write its tensors.
    """
    metas: dict[str, TensorMeta] = {}
    names: dict[int, str] = {}

    def encode(item: object) -> Ref:
        if not isinstance(item, torch.Tensor):
            raise TraceError(f"an argument of {func} is a {type(item).__name__}")
        name = names.setdefault(id(item), f"t{len(names)}")
        metas[name] = tensor_meta(item)
        return Ref(name)

    operands = tensors_in((args, kwargs))
    results = tensors_in(result)
    storages = {t.untyped_storage()._cdata for t in operands if _is_strided(t)}
    is_view = bool(results) and all(
        _is_strided(t) and t.untyped_storage()._cdata in storages for t in results
    )
    try:
        node = Node(
            name="timed",
            target=str(func),
            args=tuple(argument_from_torch(item, encode) for item in args),
            kwargs={key: argument_from_torch(item, encode) for key, item in kwargs.items()},
            results=tuple(
                Result(name=f"r{number}", tensor=tensor_meta(t), storage=number)
                for number, t in enumerate(results)
            ),
            view=is_view and not written_parameters(func),
        )
        return operation_seconds(node, metas, roofline)
    except (DocumentError, TraceError, ValueError, RuntimeError):
        size_bytes = sum(t.nbytes for t in (*operands, *results) if _is_strided(t))
        return roofline.seconds(0, size_bytes, "float32")


def _is_strided(tensor: torch.Tensor) -> bool:
    """True for a dense tensor, whose storage can be read."""
    return tensor.layout is torch.strided
