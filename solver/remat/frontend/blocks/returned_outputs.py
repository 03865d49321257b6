"""Leaving outputs out of what a model returns that is planned block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.errors import no_loss_returned
from remat.frontend.capture.model.flat_model import outputs_to_differentiate
from remat.frontend.common.pytree import flatten, unflatten


def without_other_outputs(output: Any, differentiate: str | Sequence[str]) -> Any:
    """Return a model's output with a `DroppedOutput` in place of each tensor that no gradient comes
    from, unless it has one element. Raises `TraceError` if there is no loss, or where the output
    cannot be described by data."""
    tensors, structure = flatten(output, "the model's output")
    selected = outputs_to_differentiate(structure, tensors, differentiate)
    if all(t.numel() != 1 for t, is_selected in zip(tensors, selected, strict=True) if is_selected):
        raise no_loss_returned("the model")
    returned = [s or t.numel() == 1 for t, s in zip(tensors, selected, strict=True)]
    dropped = {number for number, is_returned in enumerate(returned) if not is_returned}
    remaining = [t for t, is_returned in zip(tensors, returned, strict=True) if is_returned]
    return unflatten(structure.without_leaves(dropped), remaining)
