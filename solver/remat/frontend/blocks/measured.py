"""A block that no capture can see, run once by itself, with a graph, to see what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from remat.blockwise.step import Way
from remat.frontend.blocks.gauge import Gauge
from remat.frontend.blocks.sites import Site, trained
from remat.frontend.blocks.state import Buffers
from remat.frontend.capture.surroundings import random_numbers_restored


def measured_ways(
    gauge: Gauge,
    site: Site,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Way, ...]:
    """As it is, and checkpointed, but for what does something else when it is run again, by what it
    has changed in its buffers. Random numbers and buffers are as before afterwards."""
    before = Buffers(site.module)
    kept, forward_s = measured(gauge, site, run, args, kwargs)
    if before.changed():
        then = _outputs(run, args, kwargs)
        before.restore()
        now = _outputs(run, args, kwargs)
        before.restore()
        if not all(map(torch.equal, now, then)):
            return (kept,)
        gauge.peak()
    backward_bytes = max(kept.forward_bytes, kept.backward_bytes)
    return kept, Way(kept.time_s + forward_s, 0, kept.forward_bytes, backward_bytes)


def measured(
    gauge: Gauge,
    site: Site,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Way, float]:
    """How `run` runs in the place of the site's forward, and the seconds of its forward alone.
    Random numbers are as before afterwards."""
    torch.clear_autocast_cache()  # weights in lower precision are held from the first run on
    leaves, shape = tree_flatten((args, kwargs))
    own_leaves = [_alone(x) for x in leaves]
    own_args, own_kwargs = tree_unflatten(own_leaves, shape)
    inputs = [t for t in (*own_leaves, *trained([site])) if gets_gradient(t)]
    with random_numbers_restored():
        return _measured(gauge, lambda: run(*own_args, **own_kwargs), inputs)


def _measured(
    gauge: Gauge, run: Callable[[], Any], inputs: Sequence[torch.Tensor]
) -> tuple[Way, float]:
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
    return Way(forward_s + backward_s, saved_bytes, forward_bytes, backward_bytes), forward_s


def _outputs(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    with random_numbers_restored(), torch.no_grad():
        return [t for t in tree_leaves(run(*args, **kwargs)) if isinstance(t, torch.Tensor)]


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
