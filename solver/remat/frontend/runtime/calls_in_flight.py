"""`CallsInFlight`: counts the calls of a model whose backward has not run yet.

A step may call a model several times before one backward: then each call holds what it saves while
the next one runs. A call is in flight until the backward reaches its outputs, or their graph is
freed.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.frontend.common.pytree import tensors_in


class CallsInFlight:
    """The calls of one model in flight: `pending` is their number now, `most` the largest number
    that one backward has ended. (Graphs that a caller keeps without a backward do not count.)"""

    def __init__(self) -> None:
        self.pending = 0
        self.most = 0
        self.ended_in_a_row = 0
        """The number of calls whose backward has started since the last call."""

    def add(self, outputs: Any) -> None:
        """Count the call that has returned these outputs. A call within hooks for saved tensors
        holds nothing: `torch.utils.checkpoint` recomputes it, `save_on_cpu` moves it."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
            return
        nodes = {t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None}
        if nodes:
            call = _Call(self)
            for node in nodes:
                node.register_prehook(call.end)


class _Call:
    """A call in flight. The nodes of its outputs have the only references to it."""

    def __init__(self, calls: CallsInFlight) -> None:
        self._calls = calls
        self._is_pending = True
        calls.pending += 1
        calls.ended_in_a_row = 0

    def end(self, gradients: object) -> None:
        """End the call: its backward starts."""
        if self._is_pending:
            calls = self._calls
            calls.ended_in_a_row += 1
            calls.most = max(calls.most, calls.ended_in_a_row)
            self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._calls.pending -= 1
