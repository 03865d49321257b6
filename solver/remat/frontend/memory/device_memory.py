"""How much memory of a device is free, and how much of it libraries take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from remat.allocator.prediction import uses_cublas

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


def library_bytes(
    device: torch.device | str,
    targets: Iterable[str],
    capability: tuple[int, int] | None = None,
) -> int:
    """Bytes that cuBLAS and cuBLASLt hold in torch's allocator during a step of these operations:
    none on the CPU, and none without matrix products. `capability` is that of a CUDA device which
    is not here.

    Up to torch 2.14 there is a workspace for the thread of the forward and one for that of the
    backward, kept once they are there. From 2.15 on it is taken for a product and given back, so
    that one is counted, unless TORCH_CUBLAS_WORKSPACE_CACHE=1. (Seen by running both versions'
    own allocators; see `scripts/allocator`.)
    """
    device = torch.device(device)
    if (device.type != "cuda" and capability is None) or not any(map(uses_cublas, targets)):
        return 0
    threads = 2 if keeps_workspaces() else 1
    return threads * _workspace_bytes(device, capability)


def keeps_workspaces() -> bool:
    """Whether torch keeps cuBLAS's workspaces after a product; else each product takes and frees
    one, and measuring sees it as the product's own."""
    set_to = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version < (2, 15) or set_to == "1"


def _workspace_bytes(device: torch.device, capability: tuple[int, int] | None) -> int:
    """A thread's workspace. cuBLASLt shares that of cuBLAS, unless it is told not to, or is given a
    larger one."""
    told = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    told_lt = getattr(torch.backends.cuda, "cublaslt_workspace_size", None)
    is_here = capability is None and torch.cuda.is_available()
    if is_here and told is not None and told_lt is not None:  # torch 2.13
        with torch.cuda.device(device):
            return _together(told(), told_lt())
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    lt_bytes = int(lt_kib) << 10 if lt_kib.isdigit() else _LT_BYTES
    configured = configured_workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured is None:
        major, _ = capability or torch.cuda.get_device_capability(device)
        configured = default_workspace_bytes(major)
    return _together(configured, lt_bytes)


def _together(blas_bytes: int, lt_bytes: int) -> int:
    is_shared = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1") != "0"
    return blas_bytes if is_shared else blas_bytes + lt_bytes


_LT_BYTES = 1 << 20
"""torch's default for cuBLASLt, on every architecture."""


def default_workspace_bytes(major: int) -> int:
    """torch's default workspace of a cuBLAS handle, by the major compute capability: 32 MiB from
    Hopper (9.0) on, before it 8 MiB and 128 KiB (":4096:2:16:8"). As
    `torch.backends.cuda.cublas_workspace_size()` of torch 2.15 answers for 7, 8, 9, 10 and 12;
    `aten/src/ATen/cuda/CublasHandlePool.cpp`."""
    return 32 << 20 if major >= 9 else (8 << 20) + (128 << 10)


def configured_workspace_bytes(configuration: str) -> int | None:
    """The sum of a CUBLAS_WORKSPACE_CONFIG, which is `:KiB:count` once or more, as torch reads it;
    None where that is not set, or is nothing that torch can read."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", configuration)
    return sum(int(size) * int(count) for size, count in pairs) << 10 if pairs else None
