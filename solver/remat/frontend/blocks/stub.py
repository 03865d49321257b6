"""A block that saves nothing: a node of autograd that runs it, and gives back zeros."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from remat.frontend.blocks.profile import Made, gets_gradient
from remat.frontend.common.pytree import Shape, split
from remat.frontend.memory.gauge import Gauge


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


def handed_back(outer: Any, inner: Any, leaves: Sequence[object], shape: Shape) -> bool:
    """Whether a block has changed lists or dicts of `inner`, its arguments, which were made of
    these leaves in that shape. Those of `outer` then have the same in them, without a graph."""
    now, shape_now = split(inner)
    if shape_now == shape and all(map(operator.is_, now, leaves)):
        return False
    _hand_back(outer, inner)
    return True


def _hand_back(outer: Any, inner: Any) -> None:
    bare = partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
    if isinstance(outer, list) and isinstance(inner, list):
        outer[:] = map(bare, inner)
    elif isinstance(outer, dict):
        items = {name: bare(item) for name, item in inner.items()}
        for name in outer.keys() & items.keys():
            if isinstance(outer[name], list | dict | tuple):
                _hand_back(outer[name], inner[name])
                items[name] = outer[name]
        outer.clear()
        outer.update(items)
    elif isinstance(outer, tuple):
        for before, now in zip(outer, inner, strict=True):
            _hand_back(before, now)


def _made(tensor: torch.Tensor) -> torch.Tensor:
    return Made.apply(tensor.detach().requires_grad_()) if gets_gradient(tensor) else tensor
