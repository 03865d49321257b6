"""The option `outputs`: which of a step's outputs are in memory during the backward.

The logits of a language model are often its largest tensor. Most training loops only use the loss
and release the logits before the backward, so that a plan need not count them. A step that does not
return them at all need not even have them in one piece. The loss itself is always in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.errors import similar_names_hint

OUTPUTS_HELD = "held"
"""The caller references the outputs until the backward has ended."""

OUTPUTS_DROPPED = "dropped"
"""The caller releases all outputs but the loss before the backward."""

OUTPUTS_LOSS = "loss"
"""A training step returns only what gradients come from, and tensors of one element."""

OUTPUTS = (OUTPUTS_HELD, OUTPUTS_DROPPED, OUTPUTS_LOSS)


SCALARS = "scalars"
"""The value of `differentiate` for all outputs of one element that require a gradient. It is
internal: the meaning of "auto" with `outputs="loss"`."""


def differentiated_with(outputs: str, differentiate: str | Sequence[str]) -> str | Sequence[str]:
    """Return the option `differentiate` for a step with this option `outputs`: where only the loss
    is returned, "auto" is all scalars, not all outputs."""
    return SCALARS if outputs == OUTPUTS_LOSS and differentiate == "auto" else differentiate


def are_dropped(outputs: object) -> bool:
    """True if no output but the loss is in memory during the backward, False if `outputs` is
    "held". Raises ValueError for a value that is none of `OUTPUTS`."""
    if outputs not in OUTPUTS:
        near = similar_names_hint(outputs, OUTPUTS) if isinstance(outputs, str) else ""
        raise ValueError(
            f"outputs is {outputs!r}{near}; they are {OUTPUTS_HELD!r} if a variable references "
            f"them during the backward, {OUTPUTS_DROPPED!r} if only the loss is referenced, or "
            f"{OUTPUTS_LOSS!r} if the model is to return only the loss in training"
        )
    return outputs != OUTPUTS_HELD
