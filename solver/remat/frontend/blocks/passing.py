"""A block that saves nothing: a node of autograd that runs it, and gives back zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from remat.frontend.blocks.gauge import Gauge
from remat.frontend.blocks.measured import gets_gradient


class Watcher(Protocol):
    """Who is told of the backward of a call, by its number, with the gradients that it begins with
    in a list to be emptied. `anchors` make sure that there is one."""

    gauge: Gauge
    anchors: list[torch.Tensor]

    def backward_of(self, number: int, tangents: list[torch.Tensor | None]) -> None:
        """It begins."""
        ...


class Passing(torch.autograd.Function):
    """Its graph is there only while it runs, to tell which of its results have a gradient."""

    boxed_grads_call = True  # as that of `runtime.step`, which lets go of them like this

    @staticmethod
    def forward(
        ctx: Any,
        watcher: Watcher,
        number: int,
        run: Callable[..., tuple[torch.Tensor, ...]],
        count: int,
        anchor: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        """The first `count` tensors are the block's inputs, the others its parameters."""
        ctx.set_materialize_grads(False)
        ctx.watcher, ctx.number = watcher, number
        ctx.given = [(t.shape, t.dtype, t.device) if gets_gradient(t) else None for t in tensors]
        watcher.anchors.append(anchor)
        with torch.enable_grad():
            found = run(*map(_made, tensors[:count]))
        has_none = [not t.requires_grad for t in found]
        results = tuple(t.detach() for t in found)
        del found
        pairs = zip(results, has_none, strict=True)
        ctx.mark_non_differentiable(*(t for t, without in pairs if without))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        boxed = grads[0] if isinstance(grads[0], list) else list(grads)
        del grads
        ctx.watcher.backward_of(ctx.number, boxed)
        zeros = [
            None if given is None else torch.zeros(given[0], dtype=given[1], device=given[2])
            for given in ctx.given
        ]
        ctx.watcher.gauge.peak()
        return None, None, None, None, None, *zeros


class _Made(torch.autograd.Function):
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


def _made(tensor: torch.Tensor) -> torch.Tensor:
    return _Made.apply(tensor.detach().requires_grad_()) if gets_gradient(tensor) else tensor
