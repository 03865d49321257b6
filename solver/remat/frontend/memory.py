"""How much memory of a device is free, and how much of it libraries take."""

from __future__ import annotations

from pathlib import Path

import torch

_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device | str) -> int | None:
    """Free bytes of a device, or None where nobody tells.

    What torch has reserved on a CUDA device and does not use counts as free; so does page cache on
    the CPU. A container's limit counts where it is the smaller.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [size for size in (_system_bytes(), _container_bytes()) if size is not None]
    return min(found, default=None)


def _system_bytes() -> int | None:
    try:
        return _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    except (OSError, ValueError):
        return None


def _container_bytes() -> int | None:
    """What is left of a control group's limit (version 2), which MemAvailable does not know."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        cache = _field(_GROUP / "memory.stat", "inactive_file")
        used = int((_GROUP / "memory.current").read_text()) - cache
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


def library_bytes(device: torch.device | str, capability: tuple[int, int] | None = None) -> int:
    """Bytes that cuBLAS holds in torch's allocator during a step: a workspace for the thread of the
    forward and one for that of the backward. 32 MiB each on Hopper, 8 MiB and a little before it
    (torch's defaults; not known to be exact on other devices). `capability` is that of a CUDA
    device which is not here."""
    device = torch.device(device)
    if device.type != "cuda" and capability is None:
        return 0
    major, _ = capability or torch.cuda.get_device_capability(device)
    workspace = 32 << 20 if major >= 9 else (8 << 20) + (128 << 10)
    return 2 * workspace
