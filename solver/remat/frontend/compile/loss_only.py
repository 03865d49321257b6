"""The option `outputs="loss"` of torch.compile: graphs that return no tensor but the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat.frontend.common.dropped_output import DroppedOutput


def drop_other_outputs(gm: fx.GraphModule) -> dict[int, DroppedOutput] | None:
    """Remove the outputs of Dynamo's graph that require a gradient and have more than one element,
    and return what takes their places, by position.

    A graph without an output of one element that requires a gradient is not the end of a training
    step: it stays as it is, and the result is None. Outputs without a gradient stay, too: later
    code may need them.
    """
    (output,) = gm.graph.find_nodes(op="output")
    (values,) = output.args
    if not any(_requires_grad(value) and _is_scalar(value) for value in values):
        return None
    dropped = {
        position: DroppedOutput(value.name)
        for position, value in enumerate(values)
        if _requires_grad(value) and not _is_scalar(value)
    }
    output.args = (tuple(value for n, value in enumerate(values) if n not in dropped),)
    gm.recompile()
    return dropped


def with_dropped_outputs(
    code: Callable[..., Sequence[Any]], dropped: Mapping[int, DroppedOutput] | None
) -> Callable[..., Sequence[Any]]:
    """Return a function that calls compiled code, and inserts the dropped outputs in what it
    returns."""
    if not dropped:
        return code

    def run(*inputs: Any) -> Sequence[Any]:
        outputs = list(code(*inputs))
        for position, output in dropped.items():
            outputs.insert(position, output)
        return outputs

    return run


def _tensor(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else None


def _requires_grad(value: Any) -> bool:
    tensor = _tensor(value)
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _is_scalar(value: Any) -> bool:
    return all(isinstance(size, int) and size == 1 for size in _tensor(value).shape)
