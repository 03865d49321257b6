"""What becomes of a step's outputs: whether somebody holds them while the backward runs.

The logits of a language model are often its largest tensor. Most training loops use the loss and
let go of them, so that a plan need not count them. The loss itself is always held.
"""

from __future__ import annotations

from remat.errors import nearest

HELD = "held"
DROPPED = "dropped"


def are_dropped(outputs: object) -> bool:
    """Whether `outputs`, as people say it, are "dropped" before the backward, or "held" to its end.

    Raises ValueError for anything else.
    """
    if outputs == DROPPED:
        return True
    if outputs == HELD:
        return False
    near = nearest(outputs, (HELD, DROPPED)) if isinstance(outputs, str) else ""
    raise ValueError(
        f"outputs is {outputs!r}{near}; they are {HELD!r} while the backward runs, as by a variable"
        f" that has the model's result, or {DROPPED!r} before it, as where only the loss is kept"
    )
