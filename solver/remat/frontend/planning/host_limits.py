"""The limits of offloading: the link of a device to its host, measured once, and the host's memory.

Where steps run on a CPU, the host is a file in `REMAT_OFFLOAD_DIR`, and its disk is the link.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from remat.choice.offloaded_traces import OffloadLimits
from remat.costs.link import Link
from remat.costs.roofline import Roofline
from remat.documents.trace import Trace
from remat.errors import BudgetError, InfeasibleBudget
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost
from remat.frontend.costs.cost_key import device_name
from remat.frontend.runtime.host_file import HostFile, offload_directory
from remat.frontend.runtime.pinned_memory import pinned_memory
from remat.limits.offload import is_offload_allowed, parse_host_budget
from remat.limits.units import format_bytes

_COPY_BYTES = 64 << 20
_COPIES = 5
_FREE_SHARE = 0.5
"""The share of the free memory (or disk) that may be used by default."""


def host_limits(
    offload: str,
    host_budget: int | str | None,
    link: Link | None,
    trace: Trace,
    costs: str | Roofline | None,
    cache: CostCache | str | os.PathLike[str] | None,
) -> OffloadLimits | None:
    """Return the limits of offloading for a trace; None if nothing may be offloaded.

    Without `link`, it is that of a data sheet if the costs are, or the GPU is absent; else it is
    measured on this machine, once. Raises `BudgetError` for a host budget above what is free.
    """
    if not is_offload_allowed(offload):
        return None
    host_bytes = parse_host_budget(host_budget)
    if host_bytes == 0:
        return None
    if not isinstance(costs, Roofline) and trace.gpu and not torch.cuda.is_available():
        costs = Roofline(trace.gpu)
    if isinstance(costs, Roofline):
        return OffloadLimits(link or costs.link, host_bytes)
    if link is None:
        link = measured_link(torch.device(trace.device), cache)
    return OffloadLimits(link, _checked_host_bytes(host_bytes, trace.device))


def _checked_host_bytes(host_bytes: int | None, device: str) -> int:
    """Return the host budget in bytes: by default a half of what is free now."""
    is_cpu = device.startswith("cpu")
    free_bytes = shutil.disk_usage(offload_directory()).free if is_cpu else _free_memory_bytes()
    if host_bytes is None:
        return int(_FREE_SHARE * free_bytes)
    if host_bytes > free_bytes:
        place = f"in {offload_directory()}" if is_cpu else "of this machine's memory"
        raise BudgetError(
            f"the host budget is {format_bytes(host_bytes)}, and {format_bytes(free_bytes)} "
            f"{place} are free: pass a smaller host_budget"
        )
    return host_bytes


def _free_memory_bytes() -> int:
    """Return the memory of this machine that processes can still allocate."""
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measured_link(
    device: torch.device, cache: CostCache | str | os.PathLike[str] | None = None
) -> Link:
    """Return the bandwidth of copies between a device and its host, from the cache of measured
    costs, or measured: a fraction of a second."""
    place = str(Path(offload_directory()).resolve()) if device.type == "cpu" else ""
    keys = [
        {"link": direction, "device": device_name(device), "place": place, "bytes": _COPY_BYTES}
        for direction in ("to_host", "to_device")
    ]
    store = cache if isinstance(cache, CostCache) else CostCache(cache)
    try:
        cached = [store.get(key) for key in keys]
        if all(cost is not None for cost in cached):
            seconds = [cost.cost_s for cost in cached if cost is not None]
        else:
            seconds = _seconds_on_cpu() if device.type == "cpu" else _seconds_on_cuda(device)
            for key, copy_s in zip(keys, seconds, strict=True):
                store.put(key, MeasuredCost(copy_s, 0))
    finally:
        if store is not cache:
            store.close()
    return Link(_COPY_BYTES / seconds[0], _COPY_BYTES / seconds[1])


def _seconds_on_cpu() -> list[float]:
    """Return the median seconds to write a tensor to the file, and to read it."""
    file = HostFile(offload_directory())
    tensor = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    written_s: list[float] = []
    read_s: list[float] = []
    numbers: list[int] = []
    try:
        for _ in range(_COPIES):
            start_s = time.perf_counter()
            numbers.append(file.write(tensor))
            file.wait(numbers[-1])
            written_s.append(time.perf_counter() - start_s)
        for number in numbers:
            start_s = time.perf_counter()
            file.read(number)[1].wait()
            read_s.append(time.perf_counter() - start_s)
    finally:
        file.close()
    return [statistics.median(written_s), statistics.median(read_s)]


def _seconds_on_cuda(device: torch.device) -> list[float]:
    """Return the median seconds of a copy to pinned memory, and of one from it."""
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
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


def prepare_host(host_bytes: int, device: str) -> None:
    """Pin memory for a plan's offloaded tensors, before the first step. Raises `InfeasibleBudget`
    if fewer bytes are free on the host, and `RematError` if they cannot be pinned."""
    free_bytes = _checked_host_bytes(None, device) / _FREE_SHARE
    if host_bytes > free_bytes:
        raise InfeasibleBudget(
            f"the plan offloads {format_bytes(host_bytes)}, and {format_bytes(int(free_bytes))} "
            "are free on the host: pass a smaller host_budget"
        )
    if device.startswith("cuda") and torch.cuda.is_available():
        pinned_memory().reserve(host_bytes)
