"""External memory: what is allocated outside a graph while it runs, and counts for its budget.

A graph only knows its own inputs. If the model is known (`remat.compile`), its other parameters
count, and their gradients, which a later graph of the step has computed when this one's backward
runs. On CUDA the allocator reports everything else that is allocated when the graph is compiled:
parameters, other modules, and an optimizer's state from its second step on.
"""

from __future__ import annotations

import torch
from torch import fx

from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.compile_options import ModelBytes
from remat.frontend.compile.joint.fx_utils import node_bytes, output_tensors
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph


def external_memory_bytes(
    joint: CompiledJointGraph, model: ModelBytes, saved_by_others_bytes: int
) -> int:
    """Return the bytes that other modules use while a graph runs. `saved_by_others_bytes` are those
    that other graphs of the step save; they are counted elsewhere."""
    gradients = {storage_base(n) for n in joint.gradients if isinstance(n, fx.Node)}
    gradients_bytes = max(0, model.trainable_bytes - sum(map(node_bytes, gradients)))
    resident_bytes = model.resident_bytes
    device = _cuda_device(joint)
    if device is not None:
        allocated_bytes = torch.cuda.memory_allocated(device) - saved_by_others_bytes
        resident_bytes = max(resident_bytes, allocated_bytes)
    return max(0, resident_bytes - joint.primals_bytes) + gradients_bytes


def allocated_share(budget_bytes: int | None) -> float:
    """Return the bytes that are allocated on CUDA as a share of the budget, for the key of torch's
    caches. It is rounded, so that small changes find the same plan, and 0 if no plan depends on
    it."""
    if budget_bytes is None or not torch.cuda.is_initialized():
        return 0.0
    return round(torch.cuda.memory_allocated() / budget_bytes, 2)


def _cuda_device(joint: CompiledJointGraph) -> torch.device | None:
    devices = (t.device for node in joint.placeholders for t in output_tensors(node))
    return next((device for device in devices if device.type == "cuda"), None)
