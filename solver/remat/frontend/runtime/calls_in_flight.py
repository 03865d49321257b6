"""`CallsInFlight`: counts the calls of a model whose backward has not started.

A step may call a model several times before one backward. Then the saved tensors of each call are
in memory while the next call runs. A call is in flight until the backward reaches its outputs, or
their autograd graph is freed.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.frontend.common.pytree import tensors_in


class CallsInFlight:
    """Counts of one model's calls in flight. `pending` is their number now.

    `most` is the largest number of calls whose backward ran without another call between. A call
    without a backward counts in it if two backward passes in a row start with the same `pending`:
    then each step has it. A program that never releases such calls has more in each step, and no
    plan has room for them.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.most = 0
        self.ended_in_a_row = 0
        """The number of calls whose backward has started since the last call."""
        self._pending_at_backward = 0
        """`pending` when the latest backward started."""

    def add(self, outputs: Any) -> None:
        """Count a call with these outputs. A call inside of saved-tensor hooks does not count:
        `torch.utils.checkpoint` recomputes its saved tensors, `save_on_cpu` moves them."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
            return
        nodes = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        if nodes:
            call = _Call(self)
            for node in nodes:
                node.register_prehook(call.end)

    def note_end(self) -> None:
        """Count the end of a call, which is still pending."""
        self.ended_in_a_row += 1
        self.most = max(self.most, self.ended_in_a_row)
        if self.ended_in_a_row == 1:
            if self.pending == self._pending_at_backward:
                self.most = max(self.most, self.pending)
            self._pending_at_backward = self.pending


class _Call:
    """A call in flight. Only hooks of its outputs' autograd nodes refer to it."""

    def __init__(self, calls: CallsInFlight) -> None:
        self._calls = calls
        self._is_pending = True
        calls.pending += 1
        calls.ended_in_a_row = 0

    def end(self, gradients: object) -> None:
        """End the call: its backward starts."""
        if self._is_pending:
            self._calls.note_end()
            self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._calls.pending -= 1
