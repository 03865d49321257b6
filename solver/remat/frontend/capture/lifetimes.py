"""Lifetimes of the tensors of a step that is recorded.

Eager mode frees a tensor once nothing refers to it. That may be long after the last operation that
reads it: local variables of the model's code refer to tensors, and autograd saves some whose values
no backward formula reads (the source of `index_copy`, for its shape). A recording runs the same
code and the same autograd, so its fake tensors live as long.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import torch


class Lifetimes:
    """Calls `on_free` with the address of a storage when its last tensor is freed, and
    `on_tensor_free` with the `id` of each tensor. The address identifies a storage, so something
    else must refer to it."""

    def __init__(
        self, on_free: Callable[[int], None], on_tensor_free: Callable[[int], None]
    ) -> None:
        self._on_free = on_free
        self._on_tensor_free = on_tensor_free
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}
        self._live_tensors: Counter[int] = Counter()

    def add(self, tensor: torch.Tensor, address: int) -> None:
        """Watch a tensor whose storage is at `address`; nothing if it is watched already."""
        key = id(tensor)
        if key in self._references:
            return
        self._live_tensors[address] += 1

        def on_free(_: object) -> None:
            del self._references[key]
            self._on_tensor_free(key)
            self._live_tensors[address] -= 1
            if not self._live_tensors[address]:
                self._on_free(address)

        self._references[key] = weakref.ref(tensor, on_free)

    def stop(self) -> None:
        """Watch no tensor any more."""
        self._references.clear()
