"""What a budget in bytes contains beside a graph: what the process holds while it runs.

A graph knows only what it is given. Where the model is known (`remat.compile`), its other
parameters are counted, and their gradients, which a later graph of the step has made when this
one's backward runs. On CUDA the allocator tells what else is there when the graph is compiled:
parameters, other modules, an optimizer's state from its second step on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from remat.frontend.compile.joint.fx_utils import node_bytes, source, tensors
from remat.frontend.compile.kernels.to_solver import Step


@dataclass(frozen=True)
class ModelBytes:
    """Of parameters and buffers, and of those parameters that get gradients."""

    held_bytes: int = 0
    trainable_bytes: int = 0

    @classmethod
    def of(cls, model: object) -> ModelBytes:
        """Nothing, for what is no module."""
        if not isinstance(model, nn.Module):
            return cls()
        held = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
        trainable = (p for p in model.parameters() if p.requires_grad)
        return cls(sum(t.nbytes for t in held.values()), sum(p.nbytes for p in trainable))


def outside_bytes(step: Step, model: ModelBytes, saved_by_others_bytes: int) -> int:
    """What is held beside the graph, less the `saved_by_others_bytes` that are counted already."""
    made = {source(n) for n in step.joint.gradients if isinstance(n, fx.Node)}
    gradients_bytes = max(0, model.trainable_bytes - sum(map(node_bytes, made)))
    held_bytes = model.held_bytes
    device = _cuda(step)
    if device is not None:
        held_bytes = max(held_bytes, torch.cuda.memory_allocated(device) - saved_by_others_bytes)
    return max(0, held_bytes - step.joint.given_bytes) + gradients_bytes


def allocated_share(budget_bytes: int | None) -> float:
    """What a key of torch's caches knows of the allocator, rounded, so that small changes find the
    same plan: 0 where a plan does not depend on it."""
    if budget_bytes is None or not torch.cuda.is_initialized():
        return 0.0
    return round(torch.cuda.memory_allocated() / budget_bytes, 2)


def _cuda(step: Step) -> torch.device | None:
    devices = (t.device for node in step.joint.placeholders for t in tensors(node))
    return next((device for device in devices if device.type == "cuda"), None)
