"""A training step as a sequence of block calls, with the memory in use at each event.

A block runs forward and, later, backward. Between the two it holds what it saved, so that how much
one block saves decides how much memory the others may use. Nothing here knows what is inside a
block: each call has a list of options to run it.

Calls may offload saved tensors to the host. The copies of a call start where its forward ends. They
have ended, and the memory on the device is free, where the forward of the next call ends. They come
back from where the backward of the call before its own in the backward starts, and have arrived
where its own starts. So memory depends on the order of the events only, and a slow copy makes the
step wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from remat.costs.devices import Link
from remat.passes.offload.copies import Direction

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


class CallHostStay(NamedTuple):
    """When a call's tensors are on the host only: from the end of the forward of call
    `released_after` to the start of the backward of call `reloaded_before`."""

    released_after: int
    reloaded_before: int


@dataclass(frozen=True, slots=True)
class CallVariant:
    """An option of a call by its index, and what it offloads: the saved tensors `tensors`, by their
    positions, and their bytes."""

    option: int
    tensors: tuple[int, ...] = ()
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The peak and time of a step. `waiting_s` is the part of the time in which it waits for
    copies, `copies_s` the sum of their seconds. `host_bytes` are the most on the host at once.
    `waits_s` has the seconds of each wait, by the direction of the copy and the number of its call.
    """

    peak_bytes: int
    time_s: float
    waiting_s: float
    copies_s: float
    host_bytes: int
    waits_s: Mapping[tuple[Direction, int], float] = field(
        default_factory=dict[tuple[Direction, int], float]
    )


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The variants of each call that offload tensors, over a link to a host of `host_bytes`, None
    if unlimited. The handle of an offloaded tensor takes `handle_bytes` of the device, from the end
    of the forward to the backward."""

    variants_per_call: tuple[tuple[CallVariant, ...], ...]
    link: Link
    host_bytes: int | None = None
    handle_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A training step: the options of each block call, and the events in order of time.

    With pipeline parallelism, `in_flight` - 1 other batches have run their forward but not yet
    their backward. Each of them holds what its blocks saved, and `non_block_bytes_per_batch`.
    Without `host`, nothing is offloaded.
    """

    options_per_call: tuple[tuple[BlockOption, ...], ...]
    events: tuple[StepEvent, ...]
    in_flight: int = 1
    non_block_bytes_per_batch: int = 0
    host: HostCopies | None = None

    def variants(self, call: int) -> tuple[CallVariant, ...]:
        """Return the variants of a call: each option without copies, then those that offload."""
        plain = map(CallVariant, range(len(self.options_per_call[call])))
        offloading = () if self.host is None else self.host.variants_per_call[call]
        return (*plain, *(variant for variant in offloading if variant.size_bytes))

    def option(self, call: int, variant: CallVariant) -> BlockOption:
        """Return the option of a call's variant, with the bytes of its handles."""
        option = self.options_per_call[call][variant.option]
        handles_bytes = self.host.handle_bytes * len(variant.tensors) if self.host else 0
        if not handles_bytes:
            return option
        return replace(
            option,
            saved_bytes=option.saved_bytes + handles_bytes,
            forward_bytes=option.forward_bytes + handles_bytes,
            backward_bytes=option.backward_bytes + handles_bytes,
        )

    def outcome(self, variants: Sequence[CallVariant]) -> StepOutcome:
        """Return the peak and time of the step if call `c` runs in the variant `variants[c]`."""
        return _BlockStepSimulation(self, variants).run()

    def peak_bytes(self, option_indices: Sequence[int]) -> int:
        """Return the peak if call `c` runs in its option `option_indices[c]`, without copies."""
        return self.outcome([*map(CallVariant, option_indices)]).peak_bytes

    def time_s(self, option_indices: Sequence[int]) -> float:
        """Return the time if call `c` runs in its option `option_indices[c]`, without copies."""
        return self.outcome([*map(CallVariant, option_indices)]).time_s

    @property
    def other_batches_bytes(self) -> int:
        """Bytes that the other batches in flight hold outside of blocks."""
        return (self.in_flight - 1) * self.non_block_bytes_per_batch


def host_stays(step: BlockStep) -> dict[int, CallHostStay]:
    """Return when the tensors of each call would be on the host, by the calls that may offload.

    The last call of the forward may not, as no forward follows that hides its copies, and neither
    may the first of the backward.
    """
    forwards = [(n, e.call) for n, e in enumerate(step.events) if e.kind == "forward"]
    backwards = [(n, e.call) for n, e in enumerate(step.events) if e.kind == "backward"]
    following = {call: forwards[i + 1] for i, (_, call) in enumerate(forwards[:-1])}
    preceding = {call: backwards[i] for i, (_, call) in enumerate(backwards[1:])}
    return {
        call: CallHostStay(next_call, following_backward)
        for call, (forward_event, next_call) in following.items()
        if call in preceding
        for backward_event, following_backward in [preceding[call]]
        if backward_event > forward_event
    }


def useful_variants(
    options: Sequence[BlockOption], variants: Sequence[CallVariant]
) -> tuple[CallVariant, ...]:
    """Return the variants that no other variant of the call matches or beats in time and sizes."""

    def key(variant: CallVariant) -> tuple[float, ...]:
        option = options[variant.option]
        remaining_bytes = option.saved_bytes - variant.size_bytes
        sizes = (option.saved_bytes, option.forward_bytes, option.backward_bytes)
        return option.time_s, remaining_bytes, *sizes, variant.size_bytes

    useful: list[CallVariant] = []
    for variant in sorted(variants, key=key):
        if not any(
            all(b <= v for b, v in zip(key(better), key(variant), strict=True)) for better in useful
        ):
            useful.append(variant)
    return tuple(useful)


class _BlockStepSimulation:
    """Runs the events of a step in order, with a clock, the bytes in use and an engine for each
    direction of the link."""

    def __init__(self, step: BlockStep, variants: Sequence[CallVariant]) -> None:
        self._step = step
        self._options = [
            step.option(call, variant)
            for call, variant in zip(range(len(step.options_per_call)), variants, strict=True)
        ]
        self._sizes_bytes = [variant.size_bytes for variant in variants]
        stays = host_stays(step) if any(self._sizes_bytes) else {}
        self._released: dict[int, list[int]] = {}
        self._reloaded: dict[int, list[int]] = {}
        for call, size_bytes in enumerate(self._sizes_bytes):
            if size_bytes:
                stay = stays[call]
                self._released.setdefault(stay.released_after, []).append(call)
                self._reloaded.setdefault(stay.reloaded_before, []).append(call)
        self._now_s = self._copies_s = 0.0
        self._free_s: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
        self._end_s: dict[tuple[Direction, int], float] = {}
        self._waits_s: dict[tuple[Direction, int], float] = {}

    def run(self) -> StepOutcome:
        other_batches = self._step.in_flight - 1
        remaining_bytes = sum(o.saved_bytes for o in self._options) - sum(self._sizes_bytes)
        peak_bytes = 0
        saved_bytes = self._step.other_batches_bytes + other_batches * remaining_bytes
        for event in self._step.events:
            block_bytes, call = 0, event.call
            if event.kind == "forward":
                block_bytes = self._options[call].forward_bytes
            elif event.kind == "backward":
                for other in self._reloaded.get(call, ()):
                    saved_bytes += self._sizes_bytes[other]
                saved_bytes -= self._options[call].saved_bytes
                block_bytes = self._options[call].backward_bytes
            peak_bytes = max(peak_bytes, event.non_block_bytes + saved_bytes + block_bytes)
            if event.kind == "forward":
                self._run_forward(call)
                saved_bytes += self._options[call].saved_bytes
                saved_bytes -= sum(self._sizes_bytes[c] for c in self._released.get(call, ()))
            elif event.kind == "backward":
                self._run_backward(call)
        waiting_s = math.fsum(self._waits_s.values())
        return StepOutcome(
            peak_bytes,
            math.fsum(o.time_s for o in self._options) + waiting_s,
            waiting_s,
            self._copies_s,
            self._step.in_flight * sum(self._sizes_bytes),
            self._waits_s,
        )

    def _run_forward(self, call: int) -> None:
        self._now_s += self._options[call].forward_s
        self._start_copy("to_host", call)
        for other in self._released.get(call, ()):
            self._wait_for_copy("to_host", other)

    def _run_backward(self, call: int) -> None:
        for other in self._reloaded.get(call, ()):
            self._start_copy("to_device", other)
        self._wait_for_copy("to_device", call)
        self._now_s += self._options[call].time_s - self._options[call].forward_s

    def _start_copy(self, direction: Direction, call: int) -> None:
        size_bytes, host = self._sizes_bytes[call], self._step.host
        if size_bytes and host is not None:
            is_leaving = direction == "to_host"
            link = host.link
            copy_s = size_bytes / (
                link.to_host_bytes_per_s if is_leaving else link.to_device_bytes_per_s
            )
            self._copies_s += copy_s
            self._free_s[direction] = max(self._now_s, self._free_s[direction]) + copy_s
            self._end_s[direction, call] = self._free_s[direction]

    def _wait_for_copy(self, direction: Direction, call: int) -> None:
        end_s = max(self._now_s, self._end_s.get((direction, call), 0.0))
        if end_s > self._now_s:
            self._waits_s[direction, call] = end_s - self._now_s
        self._now_s = end_s
