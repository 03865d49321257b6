"""Costs of a step at tensor sizes that were not measured, scaled from measured sizes.

The time of each operation grows by the factor that a roofline predicts (for which only the ratio of
arithmetic to memory rates matters); this is accurate enough to compare schedules and to describe a
plan. Memory is never underestimated: workspaces grow like the storage that grows most, and a
storage that was measured to be larger than its tensor is larger by the same factor at all sizes.
"""

from __future__ import annotations

import math

from remat.costs.roofline import Roofline, operation_seconds
from remat.documents.records import Node
from remat.documents.trace import Trace

SCALED_COST_SOURCE = "estimated: measured at other sizes"

_TYPICAL = Roofline.custom(
    "typical", fp32_flops_per_s=1e11, bytes_per_s=1e10, half_flops_per_s=2e11, launch_s=1e-6
)
"""A device with ten FLOPs per byte of memory traffic."""


def with_scaled_costs(
    trace: Trace, measured: Trace, captured_storage_bytes: tuple[int, ...]
) -> Trace:
    """Return `trace` with the scaled costs of `measured`, a trace of the same operations.

    `captured_storage_bytes` are the storage sizes of `measured` as captured, before the measurement
    enlarged them.
    """
    sizes = list(
        zip(trace.storage_bytes, measured.storage_bytes, captured_storage_bytes, strict=True)
    )
    max_growth = max((size / captured for size, _, captured in sizes if captured), default=1.0)
    metas, measured_metas = trace.tensors, measured.tensors

    def with_scaled_cost(node: Node, measured_node: Node) -> Node:
        cost_s = measured_node.cost_s
        if cost_s:
            cost_s *= operation_seconds(node, metas, _TYPICAL) / operation_seconds(
                measured_node, measured_metas, _TYPICAL
            )
        workspace_bytes = measured_node.workspace_bytes
        if workspace_bytes is not None:
            workspace_bytes = math.ceil(workspace_bytes * max(1.0, max_growth))
        return node.model_copy(
            update={
                "cost_s": cost_s,
                "launch_s": measured_node.launch_s,
                "workspace_bytes": workspace_bytes,
                "cost_source": SCALED_COST_SOURCE,
            }
        )

    nodes = tuple(map(with_scaled_cost, trace.nodes, measured.nodes))
    storages = tuple(_scaled_storage_bytes(*storage_sizes) for storage_sizes in sizes)
    return trace.replace(nodes=nodes, storage_bytes=storages)


def _scaled_storage_bytes(size_bytes: int, measured_bytes: int, captured_storage_bytes: int) -> int:
    """Return the size of a storage, enlarged by the factor that the measurement showed."""
    if measured_bytes <= captured_storage_bytes:
        return size_bytes
    if not captured_storage_bytes:
        return measured_bytes
    return math.ceil(size_bytes * (measured_bytes / captured_storage_bytes))
