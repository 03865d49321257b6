"""The budget "auto": what a step may take of a device's memory."""

from __future__ import annotations

from remat.errors import BudgetError
from remat.frontend.memory import free_bytes
from remat.trace import Trace

MARGIN = 0.08
"""Share of the free memory left alone: fragmentation, cuBLAS and cuDNN handles, other processes."""


def available_budget(trace: Trace) -> int:
    """Bytes that a step may take: what the device has free, less a margin, and what the step's own
    parameters, buffers and inputs already hold.

    Raises `BudgetError` where the device does not tell.
    """
    free = free_bytes(trace.device)
    if free is None:
        raise BudgetError(
            f'budget="auto" cannot tell the free memory of {trace.device} on this system; pass a '
            'number of bytes or a string such as "8GiB"'
        )
    already = sum(
        trace.allocated_bytes(storage)
        for storage in {p.storage for p in trace.placeholders if p.kind != "tangent"}
    )
    return int(free * (1 - MARGIN)) + already
