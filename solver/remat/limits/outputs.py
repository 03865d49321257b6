"""The option `outputs`: who still references a step's outputs during the backward.

The logits of a language model are often its largest tensor. Most training loops only use the loss
and release the logits before the backward, so that a plan need not count them. The loss itself is
always in memory.
"""

from __future__ import annotations

from remat.errors import similar_names_hint

OUTPUTS_HELD = "held"
"""The caller references the outputs until the backward has ended."""

OUTPUTS_DROPPED = "dropped"
"""The caller releases all outputs but the loss before the backward."""


def are_dropped(outputs: object) -> bool:
    """True if the option `outputs` is "dropped", False if it is "held". Raises ValueError for any
    other value."""
    if outputs == OUTPUTS_DROPPED:
        return True
    if outputs == OUTPUTS_HELD:
        return False
    near = (
        similar_names_hint(outputs, (OUTPUTS_HELD, OUTPUTS_DROPPED))
        if isinstance(outputs, str)
        else ""
    )
    raise ValueError(
        f"outputs is {outputs!r}{near}; they are {OUTPUTS_HELD!r} if a variable references them "
        f"during the backward, or {OUTPUTS_DROPPED!r} if only the loss is referenced"
    )
