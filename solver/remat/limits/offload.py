"""The options `offload` and `host_budget`: whether tensors may be offloaded to the host, and how
many bytes."""

from __future__ import annotations

from remat.errors import similar_names_hint
from remat.limits.reserve import parse_bytes

OFFLOAD_AUTO = "auto"
"""Tensors are offloaded where that makes the step faster, or the budget feasible."""

OFFLOAD_OFF = "off"
"""No tensor is offloaded."""


def is_offload_allowed(offload: object) -> bool:
    """True if `offload` is "auto", False if it is "off". Raises ValueError for anything else."""
    if offload in (OFFLOAD_AUTO, OFFLOAD_OFF):
        return offload == OFFLOAD_AUTO
    names = (OFFLOAD_AUTO, OFFLOAD_OFF)
    near = similar_names_hint(offload, names, "; near: ") if isinstance(offload, str) else ""
    raise ValueError(
        f"offload is {offload!r}{near}; it is {OFFLOAD_AUTO!r} to copy tensors to the host where "
        f"that pays, or {OFFLOAD_OFF!r}"
    )


def parse_host_budget(host_budget: int | str | None) -> int | None:
    """Return the bytes that may be on the host at once; None for the default. Raises `BudgetError`
    unless it is a number of bytes, such as "16GiB"; 0 is valid."""
    if host_budget is None:
        return None
    return parse_bytes(host_budget, "host budget", "16GiB")
