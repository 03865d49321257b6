"""The free memory of a device, and the memory that cuBLAS workspaces use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from remat.allocator.prediction import uses_cublas, uses_cublaslt
from remat.frontend.common.backward_thread import run_in_backward

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device | str) -> int | None:
    """Return the free bytes of a device; None where the system does not report them.

    Memory that torch's CUDA allocator has reserved and does not use counts as free, as does the
    page cache on the CPU. The limit of a container counts where it is smaller.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sizes = (_system_free_bytes(), _container_free_bytes())
    return min((size for size in sizes if size is not None), default=None)


def _system_free_bytes() -> int | None:
    """Return the available memory of the machine; None if /proc/meminfo does not report it."""
    try:
        return _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    except (OSError, ValueError):
        return None


def _container_free_bytes() -> int | None:
    """Return the unused part of a control group's memory limit (version 2), which MemAvailable does
    not include; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        cache = _field(_CGROUP / "memory.stat", "inactive_file")
        used = int((_CGROUP / "memory.current").read_text()) - cache
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int:
    """Return the number that follows a name in a file. Raises ValueError if it is not there."""
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


def library_bytes(
    device: torch.device | str,
    targets: Iterable[str],
    capability: tuple[int, int] | None = None,
) -> int:
    """Return the bytes of the workspaces that cuBLAS and cuBLASLt have in torch's allocator during
    a step with the operations `targets`: 0 on the CPU, and without matrix products. `capability` is
    the compute capability of a CUDA device that this machine does not have.

    Up to torch 2.14 the thread of the forward and that of the backward each have a workspace, which
    stays allocated. From 2.15 on a workspace is allocated for each product and freed after it, so
    that one counts, unless TORCH_CUBLAS_WORKSPACE_CACHE=1. (Measured with the allocators of both
    versions; see `scripts/allocator`.) A product with a bias runs in cuBLASLt, whose workspace may
    be another one.
    """
    device, targets = torch.device(device), set(targets)
    if (device.type != "cuda" and capability is None) or not any(map(uses_cublas, targets)):
        return 0
    threads = 2 if keeps_workspaces() else 1
    return threads * _workspace_bytes(device, capability, any(map(uses_cublaslt, targets)))


def allocated_workspace_bytes(device: torch.device) -> int:
    """Let cuBLAS allocate the workspaces that torch keeps, and return their bytes, which later
    measurements of the device's memory do not count; 0 where nothing is kept."""
    if device.type != "cuda" or not keeps_workspaces():
        return 0
    matrix, bias = torch.ones(16, 16, device=device), torch.ones(16, device=device)

    def multiply() -> None:
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            torch.addmm(bias, matrix, matrix)
            torch.mm(matrix, matrix)

    multiply()
    run_in_backward(multiply, device)
    return library_bytes(device, ["aten.mm.default", "aten.addmm.default"])


def keeps_workspaces() -> bool:
    """True if torch keeps cuBLAS's workspaces after a matrix product. If False, each product
    allocates and frees one, and a measurement counts it as the product's own workspace."""
    cache_setting = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE")
    return _torch_version() < (2, 15) or cache_setting == "1"


def _workspace_bytes(device: torch.device, capability: tuple[int, int] | None, has_lt: bool) -> int:
    """Return the bytes of one thread's workspaces of cuBLAS and, with `has_lt`, of cuBLASLt."""
    blas_size = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    lt_size = getattr(torch.backends.cuda, "cublaslt_workspace_size", None)
    is_local = capability is None and torch.cuda.is_available()
    if is_local and blas_size is not None and lt_size is not None:  # torch 2.13
        with torch.cuda.device(device):
            return _combined_bytes(blas_size(), lt_size() if has_lt else 0)
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    lt_bytes = int(lt_kib) << 10 if lt_kib.isdigit() else _DEFAULT_LT_BYTES
    configured = configured_workspace_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured is None:
        major, _ = capability or torch.cuda.get_device_capability(device)
        configured = default_workspace_bytes(major)
    return _combined_bytes(configured, lt_bytes if has_lt else 0)


def _combined_bytes(blas_bytes: int, lt_bytes: int) -> int:
    """Return the bytes of both workspaces.

    From torch 2.13 on cuBLASLt shares that of cuBLAS, unless the environment says that it must not.
    Before, it shares it only if the environment says so. With torch 2.11, plans without it were
    exceeded by one or two megabytes (H200, 2026-11-27); that 2.12 is like 2.11 is an assumption.
    """
    setting = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    is_shared = setting == "1" if _torch_version() < (2, 13) else setting != "0"
    return blas_bytes if is_shared else blas_bytes + lt_bytes


def _torch_version() -> tuple[int, ...]:
    """Return the major and minor version of torch."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


_DEFAULT_LT_BYTES = 1 << 20
"""torch's default workspace of cuBLASLt, on every architecture."""


def default_workspace_bytes(major: int) -> int:
    """Return the bytes of torch's default workspace of a cuBLAS handle.

    By the major compute capability, 32 MiB from Hopper (9.0) on, before it 8 MiB and 128 KiB
    (":4096:2:16:8"). Source: `torch.backends.cuda.cublas_workspace_size()` of torch 2.15 for 7, 8,
    9, 10 and 12; `aten/src/ATen/cuda/CublasHandlePool.cpp`.
    """
    return 32 << 20 if major >= 9 else (8 << 20) + (128 << 10)


def configured_workspace_bytes(configuration: str) -> int | None:
    """Return the total bytes of a CUBLAS_WORKSPACE_CONFIG, which is `:KiB:count` once or more, as
    torch reads it; None if it is empty or torch cannot read it."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", configuration)
    return sum(int(size) * int(count) for size, count in pairs) << 10 if pairs else None
