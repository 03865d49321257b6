"""How much memory a step may take on a device: the budget "auto"."""

from __future__ import annotations

from pathlib import Path

import torch

from remat.errors import BudgetError
from remat.trace import Trace

MARGIN = 0.08
"""Share of the free memory left alone: fragmentation, cuBLAS and cuDNN handles, other processes."""


def available_budget(trace: Trace) -> int:
    """Bytes that a step may take: what the device has free, less a margin, and what the step's own
    parameters, buffers and inputs already hold.

    Raises `BudgetError` where the device does not tell.
    """
    already = sum(
        trace.allocated_bytes(storage)
        for storage in {p.storage for p in trace.placeholders if p.kind != "tangent"}
    )
    return int(free_bytes(trace.device) * (1 - MARGIN)) + already


def free_bytes(device: str) -> int:
    """Free bytes of a device; what torch has reserved but does not use counts as free."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    raise BudgetError(
        f'budget="auto" cannot tell the free memory of {device} on this system; pass a number of '
        'bytes or a string such as "8GiB"'
    )
