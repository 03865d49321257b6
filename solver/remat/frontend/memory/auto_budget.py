"""The budget "auto": what a step may take of a device's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat.documents.trace import Trace, accumulated_bytes
from remat.errors import BudgetError
from remat.frontend.memory.device_memory import free_bytes
from remat.limits.budget import format_bytes

MARGIN = 0.08
"""Share of the free memory left alone: fragmentation, cuBLAS and cuDNN handles, other processes."""


SEGMENTS_MARGIN = 0.02
"""The same, of what torch's segments are predicted to take: fragments are in that already."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that a step may take, and that the allocator's segments may."""

    budget_bytes: int
    reserved_bytes: int


def available(trace: Trace, *, missing_bytes: int = 0, is_there: bool = True) -> Available:
    """What the device has free, less a margin and `missing_bytes` that others will take, and what
    the step's own parameters, buffers, inputs and (accumulating) gradients already hold, if
    `is_there`.

    Raises `BudgetError` where the device does not tell.
    """
    already = 0
    if is_there:
        storages = {p.storage for p in trace.placeholders if p.kind != "tangent"}
        already = sum(map(trace.allocated_bytes, storages))
        already += accumulated_bytes(trace) if trace.accumulating else 0
    return left_on(trace.device, already, missing_bytes=missing_bytes)


def left_on(device: torch.device | str, already_bytes: int, *, missing_bytes: int = 0) -> Available:
    """As `available`, where a step already holds so many bytes."""
    free = free_bytes(device)
    if free is None:
        raise BudgetError(
            f'budget="auto" cannot tell the free memory of {device} on this system; pass a '
            'number of bytes or a string such as "8GiB"'
        )
    budget_bytes = int(free * (1 - MARGIN)) - missing_bytes + already_bytes
    if budget_bytes <= 0:
        raise BudgetError(
            f"{format_bytes(free)} are free on {device}, and {format_bytes(missing_bytes)} "
            "are reserved: nothing is left for the step"
        )
    segments_bytes = int(free * (1 - SEGMENTS_MARGIN)) - missing_bytes + already_bytes
    return Available(budget_bytes, segments_bytes)
