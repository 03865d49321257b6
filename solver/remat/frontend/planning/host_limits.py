"""The limits of offloading: the link of a device to its host, measured once, and the host's memory.

Where steps run on a CPU, the host is a file in `REMAT_OFFLOAD_DIR`. Its bandwidth is measured as
steps use it. With the page cache of the system, steps that offload more than that has room for are
slower; with direct I/O the bandwidth is the disk's.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from remat.choice.offloaded_forms import MIN_BYTES, OffloadLimits
from remat.costs.devices import Link
from remat.costs.roofline import Roofline
from remat.documents.targets import ARRIVE_TARGET, OFFLOAD_TARGET
from remat.documents.trace import Trace
from remat.errors import BudgetError
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost
from remat.frontend.costs.cost_key import MEASUREMENT_VERSION, device_name
from remat.frontend.memory.device_memory import free_bytes
from remat.frontend.runtime.host_file import is_io_direct, new_host_file, offload_directory
from remat.frontend.runtime.pinned_memory import pinned_memory
from remat.limits.units import format_bytes
from remat.plan_options import OffloadOptions

_COPY_BYTES = 64 << 20
_COPIES = 11
_FREE_SHARE = 0.5
"""The share of the free memory (or disk) that may be used by default."""


def host_limits(
    offload: OffloadOptions | None,
    trace: Trace,
    costs: str | Roofline | None,
    cache: CostCache | str | os.PathLike[str] | None,
    *,
    runs_locally: bool = True,
) -> OffloadLimits | None:
    """Return the limits of offloading for a trace; None if nothing may be offloaded.

    If the options have no link, it comes from a data sheet if `costs` do or the GPU is absent; else
    it is measured on this machine, once. With `runs_locally`, the step will run on this machine:
    the free memory limits the host budget. Raises `BudgetError` for a host budget above what is
    free, and `RematError` for a directory in which no file can be created.
    """
    if offload is None:
        return None
    host_bytes, link = offload.host_bytes, offload.link
    if trace.gpu and not torch.cuda.is_available():
        runs_locally = False
        if not isinstance(costs, Roofline):
            costs = Roofline(trace.gpu)
    device = torch.device(trace.device)
    if link is None:
        link = costs.link if isinstance(costs, Roofline) else measured_link(device, cache)
    return (
        offload_limits_here(host_bytes, link, device)
        if runs_locally
        else OffloadLimits(link, host_bytes)
    )


def offload_limits_here(
    host_bytes: int | None, link: Link | None, device: torch.device
) -> OffloadLimits:
    """Return the limits of offloading on this machine. Without `link`, it is measured, once; the
    free memory limits `host_bytes`.

    Raises `BudgetError` for more bytes than what is free, and `RematError` for a directory in which
    no file can be created.
    """
    if host_bytes != 0:
        host_bytes = _checked_host_budget(host_bytes, device)
    return OffloadLimits(link or measured_link(device), host_bytes)


def _checked_host_budget(host_bytes: int | None, device: torch.device) -> int | None:
    """Return the host budget in bytes: `host_bytes`, or for None half of the memory (or disk)
    that is free now, with a warning if that is too little. None where the system does not report
    the free memory. Raises `BudgetError` if less is free."""
    free_bytes = _free_host_bytes(device)
    if free_bytes is None:
        return host_bytes
    if host_bytes is None:
        host_bytes = int(_FREE_SHARE * free_bytes)
        if host_bytes < MIN_BYTES:
            warnings.warn(
                f"nothing is offloaded: {format_bytes(free_bytes)} {_host_place_text(device)} are "
                "free; free some host memory, or pass host_budget",
                stacklevel=2,
            )
        return host_bytes
    if host_bytes > free_bytes:
        raise BudgetError(
            f"the host budget is {format_bytes(host_bytes)}, and {format_bytes(free_bytes)} "
            f"{_host_place_text(device)} are free: pass a smaller host_budget"
        )
    return host_bytes


def _free_host_bytes(device: torch.device) -> int | None:
    """Return the free bytes for offloaded tensors: on the file's disk where steps run on a CPU,
    else of the host's memory; None where the system does not report them. Memory that earlier plans
    have pinned counts as free: their steps do not run at the same time. Raises `RematError` if the
    file cannot be created."""
    if device.type == "cpu":
        new_host_file().close()  # raises an error that names the directory
        return shutil.disk_usage(offload_directory()).free
    free = free_bytes("cpu")
    if free is None or not torch.cuda.is_available():
        return free
    return free + pinned_memory(device).pinned_bytes


def _host_place_text(device: torch.device) -> str:
    """Return the text for the host of a device in messages: "in /tmp", "of this machine's
    memory"."""
    return f"in {offload_directory()}" if device.type == "cpu" else "of this machine's memory"


def measured_link(
    device: torch.device, cache: CostCache | str | os.PathLike[str] | None = None
) -> Link:
    """Return the bandwidth of copies between a device and its host, each way: from the cache of
    measured costs, else measured, which takes a fraction of a second."""
    place = ""
    if device.type == "cpu":
        place = str(Path(offload_directory()).resolve()) + (", direct" if is_io_direct() else "")
    keys = [
        {
            "measurement": MEASUREMENT_VERSION,
            "link": direction,
            "device": device_name(device),
            "place": place,
            "bytes": _COPY_BYTES,
        }
        for direction in ("to_host", "to_device")
    ]
    costs = cache if isinstance(cache, CostCache) else CostCache(cache)
    try:
        cached = [costs.get(key) for key in keys]
        if all(cost is not None for cost in cached):
            seconds = [cost.cost_s for cost in cached if cost is not None]
        else:
            seconds = _file_copy_seconds() if device.type == "cpu" else _pinned_copy_seconds(device)
            for key, copy_s in zip(keys, seconds, strict=True):
                costs.put(key, MeasuredCost(copy_s, 0))
    finally:
        if costs is not cache:
            costs.close()
    return Link(_COPY_BYTES / seconds[0], _COPY_BYTES / seconds[1])


def _file_copy_seconds() -> list[float]:
    """Return the median seconds to write 64 MiB to the file of offloaded tensors, and to read them.
    They are written to the same offset each time, as in all steps but the first: new pages take ten
    times as long."""
    file = new_host_file()
    tensor = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    written_s: list[float] = []
    read_s: list[float] = []
    try:
        for _ in range(1 + _COPIES):
            start_s = time.perf_counter()
            number = file.write(tensor)
            file.wait(number)
            written_s.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            file.read(number)[1].wait()
            read_s.append(time.perf_counter() - start_s)
            file.drop_reference(number)
    finally:
        file.close()
    return [statistics.median(written_s[1:]), statistics.median(read_s[1:])]


def _pinned_copy_seconds(device: torch.device) -> list[float]:
    """Return the median seconds to copy 64 MiB from a GPU to pinned memory, and back."""
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)

    def median_s(copy: Callable[[], object]) -> float:
        seconds: list[float] = []
        for _ in range(_COPIES):
            torch.cuda.synchronize(device)
            start_s = time.perf_counter()
            copy()
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds)

    return [
        median_s(lambda: pinned.copy_(on_device, non_blocking=True)),
        median_s(lambda: on_device.copy_(pinned, non_blocking=True)),
    ]


def prepare_host_for_trace(trace: Trace) -> None:
    """Pin memory for the offloaded tensors of a plan's trace, before its first step. Does nothing
    without offloaded tensors; on a CPU, only checks what is free. Raises `BudgetError` if less is
    free on the host, and `RematError` if it cannot be pinned."""
    sizes_bytes: list[int] = []
    host_bytes = most_bytes = 0
    for node in trace.nodes:
        if node.target == OFFLOAD_TARGET:
            sizes_bytes.append(trace.storage_bytes[trace.storage_of[node.operand_names[0]]])
            host_bytes += sizes_bytes[-1]
            most_bytes = max(most_bytes, host_bytes)
        elif node.target == ARRIVE_TARGET:
            host_bytes -= trace.storage_bytes[node.results[0].storage]
    reserve_host_memory(torch.device(trace.device), sizes_bytes, most_bytes)


def reserve_host_memory(device: torch.device, sizes_bytes: Sequence[int], most_bytes: int) -> None:
    """Pin memory for tensors of these sizes, of which at most `most_bytes` are on the host at once,
    before the first step. On a CPU, only checks what is free. Raises `BudgetError` if less is free
    on the host, and `RematError` if it cannot be pinned."""
    if not sizes_bytes:
        return
    free_bytes = _free_host_bytes(device)
    if free_bytes is not None and most_bytes > free_bytes:
        raise BudgetError(
            f"the plan offloads {format_bytes(most_bytes)}, and {format_bytes(free_bytes)} "
            f"{_host_place_text(device)} are free: pass a smaller host_budget"
        )
    if device.type == "cuda" and torch.cuda.is_available():
        pinned_memory(device).reserve(sizes_to_pin(sizes_bytes, most_bytes))


def sizes_to_pin(sizes_bytes: Sequence[int], most_bytes: int) -> list[int]:
    """Return sizes in bytes to pin for tensors of which at most `most_bytes` are on the host at
    once: the largest tensors, and the rest of `most_bytes` in one piece. Others reuse the memory
    of these."""
    pinned: list[int] = []
    remaining_bytes = min(most_bytes, sum(sizes_bytes))
    for size_bytes in sorted(sizes_bytes, reverse=True):
        if size_bytes <= remaining_bytes:
            pinned.append(size_bytes)
            remaining_bytes -= size_bytes
    return [*pinned, remaining_bytes] if remaining_bytes else pinned
