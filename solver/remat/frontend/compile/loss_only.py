"""The option `outputs="loss"` of torch.compile: graphs that return no tensor but the loss; and
losses of Transformers at which Dynamo would break the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from remat.frontend.common.pytree import DroppedOutput
from remat.frontend.compile.fx_utils import storage_bytes
from remat.limits.options import OUTPUTS_LOSS
from remat.limits.units import format_bytes

_DEFAULT_LOSS_TYPE = "ForCausalLM"
"""The loss type of those models of Transformers whose class has none."""


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


def loss_only_hint(gm: fx.GraphModule, outputs: str) -> str:
    """Return a sentence without its full stop that recommends `outputs="loss"`; "" where Dynamo's
    graph has no loss, or no other outputs with a gradient that can be left out."""
    (output,) = gm.graph.find_nodes(op="output")
    with_gradient = [value for value in output.args[0] if _requires_grad(value)]
    others = [value for value in with_gradient if not _is_scalar(value)]
    if outputs == OUTPUTS_LOSS or len(others) in (0, len(with_gradient)):
        return ""
    others_bytes = sum(storage_bytes(_tensor(value)) for value in others)
    return (
        f'With outputs="loss" the graph returns only its loss: {format_bytes(others_bytes)} of '
        "other outputs, and as much for their gradients, need not be in memory as a whole"
    )


def set_default_loss_types(model: object) -> None:
    """Give the models of Transformers that have no loss type the one that they use then.

    They warn about it, and Dynamo breaks the graph at the warning: between the logits and the loss,
    so that both have to exist as a whole.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if not isinstance(model, nn.Module) or transformers is None:
        return
    pretrained_model: Any = getattr(transformers, "PreTrainedModel", None)
    for module in model.modules():
        if (
            pretrained_model is not None
            and isinstance(module, pretrained_model)
            and getattr(module, "loss_type", "") is None
        ):
            module.loss_type = _DEFAULT_LOSS_TYPE  # type: ignore[assignment]


def _tensor(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else None


def _requires_grad(value: Any) -> bool:
    tensor = _tensor(value)
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _is_scalar(value: Any) -> bool:
    return all(isinstance(size, int) and size == 1 for size in _tensor(value).shape)
