"""A training step seen from outside of its blocks: when each of them runs, and what is held then.

A block runs forward and, later, backward. Between the two it holds what it saved, so that how much
one block saves decides on how much room the others have. Nothing here knows what is inside of a
block: for each call there is a list of ways to run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a call of a block, forward and backward, in seconds and bytes.

    `saved_bytes` are held from its forward to its backward. `forward_bytes` and `backward_bytes`
    are the most that it holds itself while either runs: what it saved counts in its backward.
    """

    time_s: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """A part of the step, in the order of time: of a `call`'s forward or backward, or (without one)
    of what runs outside of all blocks. `held_bytes` are there without what blocks hold: outside of
    blocks the most of them, else those at its start."""

    kind: Literal["outside", "forward", "backward"]
    held_bytes: int
    call: int = -1


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The ways of each call, and the events of the step. Meanwhile `in_flight` - 1 other batches
    have had their forward, but not their backward: of each, what blocks saved is held, and
    `outside_bytes`."""

    calls: tuple[tuple[Way, ...], ...]
    events: tuple[Event, ...]
    in_flight: int = 1
    outside_bytes: int = 0

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The peak where call c runs in its way `chosen[c]`."""
        ways = [options[way] for options, way in zip(self.calls, chosen, strict=True)]
        peak_bytes = 0
        saved_bytes = self.others_bytes + (self.in_flight - 1) * sum(w.saved_bytes for w in ways)
        for event in self.events:
            own_bytes = 0
            if event.kind == "forward":
                own_bytes = ways[event.call].forward_bytes
            elif event.kind == "backward":
                saved_bytes -= ways[event.call].saved_bytes
                own_bytes = ways[event.call].backward_bytes
            peak_bytes = max(peak_bytes, event.held_bytes + saved_bytes + own_bytes)
            if event.kind == "forward":
                saved_bytes += ways[event.call].saved_bytes
        return peak_bytes

    @property
    def others_bytes(self) -> int:
        """Of the other batches in flight, outside of blocks."""
        return (self.in_flight - 1) * self.outside_bytes

    def time_s(self, chosen: Sequence[int]) -> float:
        """The time of all calls."""
        pairs = zip(self.calls, chosen, strict=True)
        return math.fsum(options[way].time_s for options, way in pairs)
