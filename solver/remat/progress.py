"""What a running solve tells its caller, and how the caller stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a solve stands.

    `incumbent` and `bound` are overheads (extra time over the time without recomputation) in the
    phase "cost", and peak bytes in the phase "peak"; None where none is known. `gap` is
    (cost - bound) / cost, on total time or on total bytes. `budget_bytes` is None in the phase
    "peak", which looks for the smallest.
    """

    phase: str
    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    budget_bytes: int | None = None


ProgressCallback = Callable[[Progress], None]


class Cancel(Protocol):
    """Anything like `threading.Event`: set it, from any thread, to end the solve early."""

    def is_set(self) -> bool:
        """Whether the solve shall end now with the best it has."""
        ...
