"""`StepCopies`: the copies of one step of blocks to the host and back, where its order says.

A block's saved tensors start to leave where its forward ends. They have left where the forward of
the next block ends, and start to come back where the backward of the block before it in the
backward starts. If calls come in another order than planned, tensors come back where they are
needed, and the step waits for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from remat.frontend.common.pytree import tensors_in
from remat.frontend.runtime.offload import arrive, offload, release, reload


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """The copies of a call: the positions of the saved tensors that it offloads, and the number of
    the call whose tensors start to come back where its backward starts, None if there is none."""

    positions: tuple[int, ...] = ()
    reloads: int | None = None


class _Offloading(NamedTuple):
    """A tensor that is copied to the host, its version when that started, and its handle."""

    tensor: torch.Tensor
    version: int
    handle: torch.Tensor


class StepCopies:
    """The copies of one step, by the numbers of its block calls.

    Once a tensor has left, only the graph has a reference to its handle: without the graph, the
    copy is of no use.
    """

    def __init__(self, planned: Mapping[int, PlannedCopies]) -> None:
        self._planned = planned
        self._offloading: dict[int, list[_Offloading]] = {}
        self._handles: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}
        self._arriving: dict[int, dict[int, torch.Tensor]] = {}
        self._overwritten: set[int] = set()

    def of_call(self, call: int) -> CallCopies | None:
        """Return the copies of a call; None if it neither offloads nor starts a reload."""
        return CallCopies(self, call) if call in self._planned else None

    def start_offload(self, call: int, saved: list[torch.Tensor]) -> None:
        """Start to copy what a call offloads, and put handles in place of the tensors."""
        for position in self._planned[call].positions:
            tensor = saved[position]
            if not _is_whole(tensor):
                continue
            handle = offload(tensor.detach())
            saved[position] = handle
            offloading = _Offloading(tensor.detach(), tensor._version, handle)
            self._offloading.setdefault(call, []).append(offloading)
            self._handles.setdefault(call, {})[position] = weakref.ref(handle)

    def end_forward(self, call: int | None = None) -> None:
        """Wait until the tensors of all calls but `call` have left, and free them."""
        for other in [number for number in self._offloading if number != call]:
            self._release(other)

    def _release(self, call: int) -> None:
        for offloading in self._offloading.pop(call, ()):
            release(offloading.handle, offloading.tensor)
            if offloading.tensor._version != offloading.version:
                self._overwritten.add(call)

    def restore(self, call: int, saved: list[torch.Tensor]) -> None:
        """Put tensors in place of a call's handles, and start to reload those of the call whose
        backward is next. What was reloaded for others is freed: their backward did not come."""
        arriving = self._arriving.pop(call, {})
        self._arriving.clear()
        self._release(call)
        if call in self._overwritten:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an input of a block that was being copied to the host"
            )
        if not arriving:
            arriving = {
                position: reload(saved[position]) for position in self._handles.get(call, ())
            }
        for position in arriving:  # the slots are free once their tensors are here
            saved[position] = arriving[position]
        self._start_reload(self._planned[call].reloads)
        for tensor in arriving.values():
            arrive(tensor)

    def reload_before_backward(self, call: int, result: object) -> None:
        """Let the backward of a call that runs without a program start the reload that is planned
        there: it starts with the first gradient of the call's result."""
        planned = self._planned.get(call)
        if planned is None or planned.reloads is None:
            return
        reloads = planned.reloads

        def start(_: torch.Tensor) -> None:
            if reloads not in self._arriving:
                self._arriving.clear()
                self._start_reload(reloads)

        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(start)

    def _start_reload(self, call: int | None) -> None:
        if call is None:
            return
        self._release(call)
        handles = {position: ref() for position, ref in self._handles.get(call, {}).items()}
        if all(handle is not None for handle in handles.values()):  # else its backward has run
            self._arriving[call] = {p: reload(h) for p, h in handles.items() if h is not None}

    def abandon(self) -> None:
        """Free the tensors that are offloading, after an error in the forward."""
        self._offloading.clear()


@dataclass(frozen=True, slots=True)
class CallCopies:
    """The copies of one call of a step: see `SavedTensorCopies`."""

    step: StepCopies
    call: int

    def start_offload(self, saved: list[torch.Tensor]) -> None:
        """Start the call's copies to the host, and put handles in place of the tensors."""
        self.step.start_offload(self.call, saved)

    def restore(self, saved: list[torch.Tensor]) -> None:
        """Put tensors in place of the call's handles."""
        self.step.restore(self.call, saved)


def _is_whole(tensor: torch.Tensor | None) -> bool:
    """True for a plain tensor that fills its storage."""
    return (
        type(tensor) is torch.Tensor
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
