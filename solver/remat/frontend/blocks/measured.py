"""A block that no capture can see, run once by itself, with a graph, to see what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from remat.blockwise.step import Way
from remat.frontend.blocks.gauge import Gauge
from remat.frontend.blocks.sites import Site, trained
from remat.frontend.blocks.state import Buffers, checkpointed
from remat.frontend.capture.surroundings import random_numbers_restored
from remat.frontend.pytree import tensors_in

Gradients = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]],
    Sequence[torch.Tensor | None],
]
"""Given the ends of a graph, its inputs, and the gradients of the ends: those of the inputs."""


@dataclass(frozen=True)
class Invocation:
    """A call of the module at a site: the forward that runs, and what it is given."""

    site: Site
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """What the forward returns."""
        return self.forward(*self.args, **self.kwargs)

    def by(self, forward: Callable[..., Any]) -> Invocation:
        """The same call of another forward."""
        return replace(self, forward=forward)

    def alone(self) -> Invocation:
        """Given tensors that nothing made: a backward ends at them."""
        leaves, shape = tree_flatten((self.args, self.kwargs))
        args, kwargs = tree_unflatten([_alone(leaf) for leaf in leaves], shape)
        return replace(self, args=args, kwargs=kwargs)


def measured_ways(gauge: Gauge, call: Invocation) -> tuple[Way, ...]:
    """As it is, and checkpointed, but for what does something else when it is run again, by what it
    has changed in its buffers, or by what torch sees. That need not let go of all: what a function
    of autograd keeps without `save_for_backward` stays. Random numbers and buffers are as before
    afterwards."""
    before = Buffers(call.site.module)
    kept, forward_s = measured(gauge, call)
    if before.changed():
        then = _outputs(call)
        before.restore()
        now = _outputs(call)
        before.restore()
        if not all(map(torch.equal, now, then)):
            return (kept,)
        gauge.peak()
    try:
        again, _ = measured(gauge, call.by(partial(_checkpointed, call)))
    except CheckpointError:
        return (kept,)
    finally:
        before.restore()
    return kept, replace(again, time_s=kept.time_s + forward_s)


def _checkpointed(call: Invocation, *args: Any, **kwargs: Any) -> Any:
    return checkpointed(call.site.module, call.forward, args, kwargs)


def by_grad(
    ends: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradients, which go nowhere else."""
    return torch.autograd.grad(ends, inputs, tangents, allow_unused=True)


def measured(gauge: Gauge, call: Invocation, gradients: Gradients = by_grad) -> tuple[Way, float]:
    """What it takes with a graph, and the seconds of the forward alone. Random numbers are as
    before afterwards."""
    torch.clear_autocast_cache()  # weights in lower precision are held from the first run on
    own = call.alone()
    given = tensors_in((own.args, own.kwargs))
    inputs = [t for t in (*given, *trained([call.site])) if gets_gradient(t)]
    with random_numbers_restored():
        return _measured(gauge, own.run, given, inputs, gradients)


def _measured(
    gauge: Gauge,
    run: Callable[[], Any],
    given: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Gradients,
) -> tuple[Way, float]:
    were_there = {t.untyped_storage()._cdata for t in given}
    gauge.peak()
    before = gauge.live()
    began = now_s(inputs)
    outputs = tensors_in(run())
    forward_s = now_s(inputs) - began
    forward_bytes = gauge.peak() - before
    made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
    made_bytes = sum(size for key, size in made.items() if key not in were_there)
    saved_bytes = max(0, gauge.live() - before - made_bytes)
    ends = [t for t in outputs if t.requires_grad]
    began = now_s(inputs)
    found: object = None
    if ends and inputs:
        tangents = [torch.ones_like(t) for t in ends]
        found = gradients(ends, inputs, tangents)
        del tangents
    backward_s = now_s(inputs) - began
    backward_bytes = gauge.peak() - before
    del found, ends, outputs
    return Way(forward_s + backward_s, saved_bytes, forward_bytes, backward_bytes), forward_s


def _outputs(call: Invocation) -> list[torch.Tensor]:
    with random_numbers_restored(), torch.no_grad():
        return tensors_in(call.run())


def now_s(items: object) -> float:
    """The time, once all is done that was asked of the devices of these tensors."""
    for device in {t.device for t in tensors_in(items) if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _alone(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().requires_grad_(item.requires_grad)


def gets_gradient(item: Any) -> bool:
    """Whether it is a tensor that requires one."""
    return isinstance(item, torch.Tensor) and item.requires_grad
