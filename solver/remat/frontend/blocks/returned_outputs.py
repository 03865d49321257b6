"""Leaving outputs out of what a model returns that is planned block by block."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from remat.errors import TraceError, no_loss_returned
from remat.frontend.capture.model.flat_model import outputs_to_differentiate
from remat.frontend.common.dropped_output import DroppedOutput
from remat.frontend.common.pytree import flatten, unflatten
from remat.limits.outputs import SCALARS


def without_other_outputs(output: Any, differentiate: str | Sequence[str]) -> Any:
    """Return a model's output with a `DroppedOutput` in place of each tensor that no gradient comes
    from, unless it has one element. Raises `TraceError` if there is no loss."""
    try:
        tensors, structure = flatten(output, "the model's output")
    except TraceError:  # it contains an object such as a cache, which stays as it is
        return _with_scalars(output, differentiate)
    selected = outputs_to_differentiate(structure, tensors, differentiate)
    if all(t.numel() != 1 for t, is_selected in zip(tensors, selected, strict=True) if is_selected):
        raise no_loss_returned("the model")
    returned = [s or t.numel() == 1 for t, s in zip(tensors, selected, strict=True)]
    dropped = {number for number, is_returned in enumerate(returned) if not is_returned}
    remaining = [t for t, is_returned in zip(tensors, returned, strict=True) if is_returned]
    return unflatten(structure.without_leaves(dropped), remaining)


def _with_scalars(output: Any, differentiate: str | Sequence[str]) -> Any:
    """Return an output of mappings, tuples and other objects, in which the tensors of more than one
    element are dropped, unless `differentiate` names them."""
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
