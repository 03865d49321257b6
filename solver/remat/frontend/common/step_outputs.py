"""The outputs of a training step: which ones gradients come from, and which ones the option
`outputs="loss"` returns. `remat.passes.outputs` does the same for traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx

from remat.documents.structure import Structure
from remat.errors import TraceError, no_loss_returned
from remat.frontend.common.pytree import DroppedOutput, flatten, tensors_in, unflatten
from remat.limits.options import CRITERION, SCALARS


def outputs_to_differentiate(
    structure: Structure, tensors: list[torch.Tensor], differentiate: str | Sequence[str]
) -> list[bool]:
    """Return for each output tensor if the step computes gradients from it.

    "all" is every output that requires a gradient, "scalars" those of one element; names select
    some. "auto" is the output named `loss`, or the first of a tuple, if that is the only scalar
    one; else the same as "all". "criterion" is the same output even if there are other scalars.
    Raises `TraceError` if no output requires a gradient, or a name is unknown.
    """
    requires_grad = [t.requires_grad for t in tensors]
    if not any(requires_grad):
        raise TraceError(
            "no output of the model depends on a parameter or input that requires a gradient; "
            "unfreeze a parameter, or call the model with inputs that require grad"
        )
    if differentiate == "all":
        return requires_grad
    is_scalar = [r and t.numel() == 1 for r, t in zip(requires_grad, tensors, strict=True)]
    if differentiate == SCALARS:
        if not any(is_scalar):
            raise no_loss_returned("the model")
        return is_scalar
    paths = [structure.path_of(i) for i in range(len(tensors))]
    if differentiate not in ("auto", CRITERION):
        names = [differentiate] if isinstance(differentiate, str) else list(differentiate)
        if missing := [n for n in names if n not in paths]:
            raise TraceError(f"the model has no output {missing[0]!r}; it returns {paths}")
        return [r and p in names for r, p in zip(requires_grad, paths, strict=True)]
    for path in ("loss", "[0]"):
        is_loss = path in paths and is_scalar[paths.index(path)]
        if is_loss and (differentiate == CRITERION or sum(is_scalar) == 1):
            return [p == path for p in paths]
    return requires_grad


def differentiated_tensors(outputs: Any, differentiate: str | Sequence[str]) -> list[torch.Tensor]:
    """Return the model's outputs from which the backward starts.

    If the output contains an object that `flatten` does not accept, such as a KV cache,
    `differentiate` is ignored: return its `loss`, or without one all tensors that require a
    gradient.
    """
    try:
        tensors, structure = flatten(outputs, "the model's output")
    except TraceError:
        loss = getattr(outputs, "loss", None)
        candidates = [loss] if isinstance(loss, torch.Tensor) else tensors_in(outputs)
        return [t for t in candidates if t.requires_grad]
    selected = outputs_to_differentiate(structure, tensors, differentiate)
    return [t for t, is_selected in zip(tensors, selected, strict=True) if is_selected]


def drop_model_outputs(output: Any, differentiate: str | Sequence[str]) -> Any:
    """Return a model's output with a `DroppedOutput` in place of each tensor that no gradient comes
    from, unless it has one element. Raises `TraceError` if there is no loss."""
    try:
        tensors, structure = flatten(output, "the model's output")
    except TraceError:  # it contains an object such as a cache, which stays as it is
        return _without_large_outputs(output, differentiate)
    selected = outputs_to_differentiate(structure, tensors, differentiate)
    if all(t.numel() != 1 for t, is_selected in zip(tensors, selected, strict=True) if is_selected):
        raise no_loss_returned("the model")
    returned = [s or t.numel() == 1 for t, s in zip(tensors, selected, strict=True)]
    dropped = {number for number, is_returned in enumerate(returned) if not is_returned}
    remaining = [t for t, is_returned in zip(tensors, returned, strict=True) if is_returned]
    return unflatten(structure.without_leaves(dropped), remaining)


def _without_large_outputs(output: Any, differentiate: str | Sequence[str]) -> Any:
    """Return an output of mappings, tuples and other objects, in which a `DroppedOutput` replaces
    each tensor of more than one element, unless `differentiate` names it. Mappings are changed in
    place. Raises `TraceError` if `differentiate` is "scalars" and there is no loss."""
    names = [differentiate] if isinstance(differentiate, str) else list(differentiate)
    losses: list[str] = []

    def replaced(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and value.requires_grad:
                losses.append(path)
            return value if value.numel() == 1 or path in names else DroppedOutput(path)
        if isinstance(value, MutableMapping):
            for key, item in value.items():
                value[key] = replaced(item, f"{path}.{key}" if path else str(key))
            return value
        if type(value) in (tuple, list):
            return type(value)(replaced(item, f"{path}[{n}]") for n, item in enumerate(value))
        return value

    result = replaced(output, "")
    if not losses and SCALARS in names:
        raise no_loss_returned("the model")
    return result


# -- graphs of Dynamo -----------------------------------------------------------------------------


def droppable_graph_outputs(gm: fx.GraphModule) -> dict[int, fx.Node] | None:
    """Return the outputs of Dynamo's graph that `outputs="loss"` drops, by position: they require a
    gradient and have more than one element. None without a loss: the graph is not the end of a
    step.

    Outputs without a gradient are left out: later code may need them.
    """
    (output,) = gm.graph.find_nodes(op="output")
    others: dict[int, fx.Node] = {}
    has_loss = False
    for position, node in enumerate(output.args[0]):
        tensor = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            if all(isinstance(size, int) and size == 1 for size in tensor.shape):
                has_loss = True
            else:
                others[position] = node
    return others if has_loss else None


def drop_graph_outputs(gm: fx.GraphModule) -> dict[int, DroppedOutput] | None:
    """Remove the `droppable_graph_outputs` from Dynamo's graph, and return a placeholder for each,
    by position. Change nothing and return None without a loss."""
    others = droppable_graph_outputs(gm)
    if others is None:
        return None
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(value for n, value in enumerate(output.args[0]) if n not in others),)
    gm.recompile()
    return {position: DroppedOutput(node.name) for position, node in others.items()}


def with_dropped_outputs(
    code: Callable[..., Sequence[Any]], dropped: Mapping[int, DroppedOutput] | None
) -> Callable[..., Sequence[Any]]:
    """Return a function that calls compiled code and inserts the dropped outputs, by position, into
    its result; the code itself if none are dropped."""
    if not dropped:
        return code

    def run(*inputs: Any) -> Sequence[Any]:
        outputs = list(code(*inputs))
        for position, output in dropped.items():
            outputs.insert(position, output)
        return outputs

    return run
