"""Costs of a step at sizes at which it was not measured, from those at others.

Each operation takes as many times longer as a data sheet would say (for which only the ratio of
arithmetic to memory matters); good enough to compare schedules and to describe a plan. Memory is
counted so that it is not more: scratch of larger sizes grows as what grows most, and what was seen
to be larger than it looks is so at all sizes.
"""

from __future__ import annotations

import math

from remat.costs.pricing import tensor_metas
from remat.costs.roofline import Roofline, seconds_of
from remat.documents.records import Node
from remat.documents.trace import Trace

SOURCE = "estimated: measured at other sizes"

_TYPICAL = Roofline.custom(
    "typical", fp32_flops_per_s=1e11, bytes_per_s=1e10, half_flops_per_s=2e11, launch_s=1e-6
)
"""Ten operations for each byte."""


def at_other_sizes(trace: Trace, measured: Trace, nominal_bytes: tuple[int, ...]) -> Trace:
    """`trace` with the costs of another one of the same operations, whose storages had
    `nominal_bytes` before they were `measured`."""
    pairs = list(zip(trace.storages, measured.storages, nominal_bytes, strict=True))
    grown = max((now / then for now, _, then in pairs if then), default=1.0)
    now, before = tensor_metas(trace), tensor_metas(measured)

    def priced(node: Node, other: Node) -> Node:
        cost_s = other.cost_s
        if cost_s:
            cost_s *= seconds_of(node, now, _TYPICAL) / seconds_of(other, before, _TYPICAL)
        return node.model_copy(
            update={
                "cost_s": cost_s,
                "launch_s": other.launch_s,
                "workspace_bytes": _scaled(other.workspace_bytes, max(1.0, grown)),
                "cost_source": SOURCE,
            }
        )

    nodes = tuple(map(priced, trace.nodes, measured.nodes))
    storages = tuple(_as_seen(*sizes) for sizes in pairs)
    return trace.replace(nodes=nodes, storages=storages)


def _scaled(size_bytes: int | None, times: float) -> int | None:
    return None if size_bytes is None else math.ceil(size_bytes * times)


def _as_seen(now_bytes: int, seen_bytes: int, nominal_bytes: int) -> int:
    if seen_bytes <= nominal_bytes:
        return now_bytes
    return math.ceil(now_bytes * (seen_bytes / nominal_bytes)) if nominal_bytes else seen_bytes
