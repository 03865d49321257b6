"""Description of the machine that a result was measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


def describe(device: torch.device) -> dict[str, str | int | float | None]:
    """Return device, CPU, memory, load and versions, as a result file records them."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "device_memory_gib": _gib(torch.cuda.get_device_properties(device).total_memory)
        if cuda
        else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_gib": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "load_1min": round(os.getloadavg()[0], 2),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
    }


def slug(device: torch.device) -> str:
    """Return the device's name in a form that fits into a file name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gib(size_bytes: int) -> float:
    return round(size_bytes / 2**30, 1)
