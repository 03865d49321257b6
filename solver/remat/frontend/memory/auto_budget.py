"""The budget "auto": how much of a device's memory a step may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat.documents.trace import Trace, accumulated_gradient_bytes
from remat.errors import BudgetError
from remat.frontend.memory.device_memory import free_bytes
from remat.frontend.memory.reserve import ReserveSize
from remat.limits.budget import Budget
from remat.limits.limits import SEGMENTS_MARGIN, Limits, nothing_left

MARGIN = 0.08
"""Fraction of the free memory that no plan uses: fragmentation, handles of cuBLAS and cuDNN, other
processes."""


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """The limits of a plan whose budget is "auto": those of its peak, and the largest size in bytes
    of the segments that torch's allocator reserves."""

    limits: Limits
    segments_bytes: int


def auto_limits(trace: Trace, reserve: ReserveSize, *, is_allocated: bool = True) -> AutoLimits:
    """Return the limits for a traced step from the free memory of its device.

    Parameters, buffers, inputs and (if the step accumulates) gradients are part of the step's
    peak. If `is_allocated`, they are in memory already, and therefore not in the free memory.
    Raises `BudgetError` where the free memory is unknown, or less than the reserve.
    """
    allocated_bytes = 0
    if is_allocated:
        storages = {p.storage for p in trace.placeholders if p.kind != "tangent"}
        allocated_bytes = sum(map(trace.allocated_bytes, storages))
        allocated_bytes += accumulated_gradient_bytes(trace) if trace.accumulates_gradients else 0
    return auto_limits_of_device(trace.device, allocated_bytes, reserve)


def auto_limits_of_device(
    device: torch.device | str, allocated_bytes: int, reserve: ReserveSize
) -> AutoLimits:
    """Return the limits for a step of whose memory `allocated_bytes` are allocated already; see
    `auto_limits`."""
    free = free_bytes(device)
    if free is None:
        raise BudgetError(
            f'budget="auto" needs the free memory of {device}, which this system does not report; '
            'pass a number of bytes or a string such as "8GiB"'
        )
    step_bytes = int(free * (1 - MARGIN)) - reserve.unallocated_bytes + allocated_bytes
    if step_bytes <= 0:
        raise BudgetError(
            nothing_left(free, reserve.unallocated_bytes, f"are reserved on {device}")
        )
    segments_bytes = int(free * (1 - SEGMENTS_MARGIN)) - reserve.unallocated_bytes + allocated_bytes
    budget = Budget.parse(step_bytes + reserve.total_bytes)
    return AutoLimits(Limits(budget, reserve.total_bytes), segments_bytes)
