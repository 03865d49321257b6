"""A training step as a sequence of block calls, with the memory in use at each event.

A block runs forward and, later, backward. Between the two it holds what it saved, so that how much
one block saves decides how much memory the others may use. Nothing here knows what is inside a
block: each call has a list of options to run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PLANNED = "planned"
AS_IT_IS = "as it is"
CHECKPOINTED = "checkpointed"
SELECTIVE = "selective"
"""Names of the options of a block: under a plan, without recomputation, recomputed as a whole, and
recomputed except for the outputs that a policy saves."""


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to run a call of a block, forward and backward, with its time and memory.

    `saved_bytes` are held from the end of its forward to its backward. `forward_bytes` and
    `backward_bytes` are the block's own peaks during its forward and its backward; the latter
    includes the saved bytes. `forward_s` is the forward's part of the time.
    """

    time_s: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A phase of the step: the forward or the backward of call `call`, or code outside all blocks.

    `non_block_bytes` are in use without the memory of the blocks: their maximum during a phase
    outside blocks, their value at the start of a block's forward or backward.
    """

    kind: Literal["outside", "forward", "backward"]
    non_block_bytes: int
    call: int = -1


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A training step: the options of each block call, and the events in order of time.

    With pipeline parallelism, `in_flight` - 1 other batches have run their forward but not yet
    their backward. Each of them holds what its blocks saved, and `non_block_bytes_per_batch`.
    """

    options_per_call: tuple[tuple[BlockOption, ...], ...]
    events: tuple[StepEvent, ...]
    in_flight: int = 1
    non_block_bytes_per_batch: int = 0

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """Return the peak of the step if call `c` runs in its option number `chosen[c]`."""
        options = [
            candidates[index]
            for candidates, index in zip(self.options_per_call, chosen, strict=True)
        ]
        peak_bytes = 0
        saved_bytes = self.other_batches_bytes
        saved_bytes += (self.in_flight - 1) * sum(option.saved_bytes for option in options)
        for event in self.events:
            block_bytes = 0
            if event.kind == "forward":
                block_bytes = options[event.call].forward_bytes
            elif event.kind == "backward":
                saved_bytes -= options[event.call].saved_bytes
                block_bytes = options[event.call].backward_bytes
            peak_bytes = max(peak_bytes, event.non_block_bytes + saved_bytes + block_bytes)
            if event.kind == "forward":
                saved_bytes += options[event.call].saved_bytes
        return peak_bytes

    @property
    def other_batches_bytes(self) -> int:
        """Bytes that the other batches in flight hold outside of blocks."""
        return (self.in_flight - 1) * self.non_block_bytes_per_batch

    def time_s(self, chosen: Sequence[int]) -> float:
        """Return the time of all block calls if call `c` runs in its option number `chosen[c]`."""
        pairs = zip(self.options_per_call, chosen, strict=True)
        return math.fsum(candidates[index].time_s for candidates, index in pairs)
