"""A block that no capture can see, run once by itself, with a graph, to see what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.blockwise.step import Way
from remat.frontend.blocks.gauge import Gauge


def measured_ways(
    gauge: Gauge,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Sequence[torch.Tensor],
) -> tuple[Way, Way]:
    """As it is, and checkpointed. Random numbers are as before afterwards."""
    leaves, shape = tree_flatten((args, kwargs))
    own_leaves = [_alone(x) for x in leaves]
    own_args, own_kwargs = tree_unflatten(own_leaves, shape)
    inputs = [t for t in (*own_leaves, *parameters) if gets_gradient(t)]
    with torch.random.fork_rng(devices=[]):
        return _measured(gauge, lambda: run(*own_args, **own_kwargs), inputs)


def _measured(
    gauge: Gauge, run: Callable[[], Any], inputs: Sequence[torch.Tensor]
) -> tuple[Way, Way]:
    gauge.peak()
    before = gauge.live()
    began = _now_s(inputs)
    outputs = [t for t in tree_flatten(run())[0] if isinstance(t, torch.Tensor)]
    forward_s = _now_s(inputs) - began
    forward_bytes = gauge.peak() - before
    made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
    saved_bytes = max(0, gauge.live() - before - sum(made.values()))
    ends = [t for t in outputs if t.requires_grad]
    began = _now_s(inputs)
    found: object = None
    if ends and inputs:
        tangents = [torch.ones_like(t) for t in ends]
        found = torch.autograd.grad(ends, inputs, tangents, allow_unused=True)
        del tangents
    backward_s = _now_s(inputs) - began
    backward_bytes = gauge.peak() - before
    del found, ends, outputs
    return (
        Way(forward_s + backward_s, saved_bytes, forward_bytes, backward_bytes),
        Way(2 * forward_s + backward_s, 0, forward_bytes, max(forward_bytes, backward_bytes)),
    )


def _now_s(tensors: Sequence[torch.Tensor]) -> float:
    """Once all is done that was asked of their device."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _alone(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().requires_grad_(item.requires_grad)


def gets_gradient(item: Any) -> bool:
    """Whether it is a tensor that requires one."""
    return isinstance(item, torch.Tensor) and item.requires_grad
