"""Stub of a block: an autograd node that runs it, saves nothing, and returns zero gradients."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from remat.frontend.blocks.profile import non_leaf_alias, requires_gradient
from remat.frontend.common.pytree import ObjectTreeSpec, flatten_objects
from remat.frontend.memory.meter import Gauge


class BackwardRecorder(Protocol):
    """Records the backward of each stub. Stubs add a tensor that requires a gradient to `anchors`,
    so that their backward runs even if no input requires one."""

    gauge: Gauge
    anchors: list[torch.Tensor]

    def record_backward(self, call_index: int, tangents: list[torch.Tensor | None]) -> None:
        """Record the start of the backward of a call; `tangents` is emptied to free them."""
        ...


class StubBlock(torch.autograd.Function):
    """A block call whose graph exists only during its forward, to see which results require a
    gradient."""

    boxed_grads_call = True  # torch 2.13 then passes the tangents in a list that may be emptied

    @staticmethod
    def forward(
        ctx: Any,
        recorder: BackwardRecorder,
        call_index: int,
        run: Callable[..., tuple[torch.Tensor, ...]],
        input_count: int,
        anchor: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        """Run the block on the first `input_count` tensors; the others are its parameters."""
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.call_index = recorder, call_index
        ctx.gradient_metas = [
            (t.shape, t.dtype, t.device) if requires_gradient(t) else None for t in tensors
        ]
        recorder.anchors.append(anchor)
        with torch.enable_grad():
            outputs = run(*map(_differentiable_copy, tensors[:input_count]))
        lacks_gradient = [not t.requires_grad for t in outputs]
        results = tuple(t.detach() for t in outputs)
        del outputs
        pairs = zip(results, lacks_gradient, strict=True)
        ctx.mark_non_differentiable(*(t for t, lacks in pairs if lacks))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tangents = grads[0] if isinstance(grads[0], list) else list(grads)
        del grads
        ctx.recorder.record_backward(ctx.call_index, tangents)
        zeros = [
            None if meta is None else torch.zeros(meta[0], dtype=meta[1], device=meta[2])
            for meta in ctx.gradient_metas
        ]
        ctx.recorder.gauge.peak()
        return None, None, None, None, None, *zeros


def in_separate_storages(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs; those that share a storage with an input or with an earlier output are
    copied, as planned blocks do."""
    seen = {t.untyped_storage()._cdata for t in inputs}
    results: list[torch.Tensor] = []
    for output in outputs:
        storage = output.untyped_storage()._cdata
        results.append(output.clone() if storage in seen else output)
        seen.add(storage)
    return tuple(results)


def copy_argument_mutations(
    arguments: Any, stub_arguments: Any, leaves: Sequence[object], shape: ObjectTreeSpec
) -> bool:
    """Return True if the block modified a list, dict or dataclass among its arguments, and apply
    the changes to the caller's arguments.

    `stub_arguments` are the arguments that the block received, built from `leaves` in `shape`;
    `arguments` are the caller's, which get the same contents, with tensors detached.
    """
    leaves_after, shape_after = flatten_objects(stub_arguments)
    if shape_after == shape and all(map(operator.is_, leaves_after, leaves)):
        return False
    _copy_detached(arguments, stub_arguments)
    return True


def _copy_detached(target: Any, source: Any) -> None:
    """Give the lists, dicts and dataclasses in `target` the contents of those in `source`, without
    a graph."""
    detached = partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
    if isinstance(target, list) and isinstance(source, list):
        target[:] = map(detached, source)
    elif isinstance(target, dict):
        items = {name: detached(item) for name, item in source.items()}
        for name in target.keys() & items.keys():
            if isinstance(target[name], list | dict | tuple):
                _copy_detached(target[name], source[name])
                items[name] = target[name]
        target.clear()
        target.update(items)
    elif isinstance(target, tuple):
        for target_item, source_item in zip(target, source, strict=True):
            _copy_detached(target_item, source_item)
    elif dataclasses.is_dataclass(target) and not isinstance(target, type):
        for name, item in vars(source).items():
            object.__setattr__(target, name, detached(item))


def _differentiable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that requires a gradient detached from the caller's graph, in the same
    storage; any other tensor unchanged."""
    if not requires_gradient(tensor):
        return tensor
    return non_leaf_alias(tensor.detach().requires_grad_())
