"""A block that no capture can see, run once by itself, with a graph, to see what it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from remat.blockwise.step import Way
from remat.errors import one_line
from remat.frontend.blocks.discovery import Site, trained
from remat.frontend.blocks.module_state import Buffers, checkpointed
from remat.frontend.capture.model.context import random_numbers_restored
from remat.frontend.common.pytree import joined, split, tensors_in
from remat.frontend.memory.gauge import Gauge

logger = logging.getLogger("remat")

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
        leaves, shape = split((self.args, self.kwargs))
        args, kwargs = joined([_alone(leaf) for leaf in leaves], shape)
        return replace(self, args=args, kwargs=kwargs)

    def made(self) -> Invocation:
        """Given such tensors as if an operation had made them: a block may write to its inputs."""
        leaves, shape = split((self.args, self.kwargs))
        args, kwargs = joined([_made(leaf) for leaf in leaves], shape)
        return replace(self, args=args, kwargs=kwargs)


def measured_ways(gauge: Gauge, call: Invocation) -> tuple[Way, ...]:
    """As it is, and checkpointed, but for what must not be, or cannot be. That need not let go of
    all: what a function of autograd keeps without `save_for_backward` stays. Random numbers and
    buffers are as before afterwards."""
    before = Buffers(call.site.module)
    kept, forward_s = measured(gauge, call)
    before.restore()
    why = why_not_again(call)
    gauge.peak()
    again: Way | None = None
    if not why:
        try:
            again, _ = measured(gauge, call.by(partial(_checkpointed, call)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch sees that it saves something else, say
            why = one_line(error)
        before.restore()
    if again is None:
        logger.info("%s is not run again: %s", call.site.path, why)
        return (kept,)
    return kept, replace(again, time_s=kept.time_s + forward_s)


def why_not_again(call: Invocation) -> str:
    """Why the block must not be run twice, or "". Random numbers and buffers are as before."""
    before = Buffers(call.site.module)
    own = call.alone()
    given = tensors_in((own.args, own.kwargs))
    versions = [tensor._version for tensor in given]
    first = _outputs(own)
    # Checkpointing such a block would also be a cycle that torch never lets go of.
    if versions != [tensor._version for tensor in given]:
        before.restore()
        return "it writes to what it is given"
    second = _outputs(own)  # with whatever the first has changed
    before.restore()
    if len(first) != len(second) or not all(map(_same, first, second)):
        return "it returns something else when it runs again"
    return ""


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
        return _measured(gauge, lambda: own.made().run(), given, inputs, gradients)


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


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of kernels of a GPU that add in any order, but for that."""
    if one.shape != other.shape or not one.is_cuda:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def now_s(items: object) -> float:
    """The time, once all is done that was asked of the devices of these tensors."""
    for device in {t.device for t in tensors_in(items) if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _alone(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().clone().requires_grad_(item.requires_grad)


def _made(item: Any) -> Any:
    return Made.apply(item) if gets_gradient(item) else item


class Made(torch.autograd.Function):
    """The same numbers in the same storage, as if an operation had made them: unlike a leaf, a
    block may write to its input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        shape, stride = tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def gets_gradient(item: Any) -> bool:
    """Whether it is a tensor that requires one."""
    return isinstance(item, torch.Tensor) and item.requires_grad
