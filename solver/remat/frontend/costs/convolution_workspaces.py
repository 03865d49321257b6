"""Workspaces of convolutions, which cuDNN selects: no formula gives them, so they are measured."""

from __future__ import annotations

import torch

from remat.costs.trace_costs import OperationCost, with_costs
from remat.documents.trace import Trace, convolutions
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.operation_costs import measure_operations
from remat.frontend.costs.progress_bar import progress_reporter


def with_measured_convolutions(trace: Trace) -> Trace:
    """Return a trace with costs, in which convolutions have measured workspaces; their times stay.

    The trace's device is a GPU of this machine. Each distinct convolution runs there on tensors
    created for it, unless the user's cost cache has it. One that fails, for example because its
    tensors do not fit, gets a workspace as large as its operands and results, with a warning.
    """
    nodes = convolutions(trace)
    if not nodes:
        return trace
    device = torch.device(trace.device)
    cache = CostCache()
    try:
        with progress_reporter(None) as report:
            measured = measure_operations(
                nodes, trace.tensors, device, cache, report, trace_device_type=device.type
            )
    finally:
        cache.close()
    costs: dict[str, OperationCost] = {}
    for node in nodes:
        cost = measured[node.name]
        costs[node.name] = OperationCost(
            node.cost_s or 0.0,
            cost.workspace_bytes,
            node.cost_source,
            cost.output_bytes,
            node.launch_s,
        )
    return with_costs(trace, costs)
