"""Notices callers who let go of what a plan counts as held: outputs, before the backward starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.documents.program import Program
from remat.limits.budget import format_bytes

logger = logging.getLogger("remat")

_LOOKS = 3
"""Backward passes in a row after which it is no coincidence."""

_WORTH = 0.01
"""Of the peak."""


class ReturnedOutputs:
    """The outputs of a program that take memory only because their caller may hold them. Looks
    until it is sure, and only where a plan for less would recompute less."""

    def __init__(self, program: Program) -> None:
        pays = any(statement.rerun for statement in program.backward)
        self._looking = pays and not program.outputs_dropped
        self._alone = [n for n, o in enumerate(program.outputs) if o.name not in program.saved]
        self._least_bytes = program.predicted_peak_bytes * _WORTH
        self._looks = 0

    def note(self, outputs: Sequence[torch.Tensor]) -> dict[StorageWeakRef, int]:
        """What of a forward may be let go of, with its bytes."""
        if not self._looking:
            return {}
        storages = [outputs[number].untyped_storage() for number in self._alone]
        return {StorageWeakRef(storage): storage.nbytes() for storage in storages}

    def look(self, noted: dict[StorageWeakRef, int]) -> None:
        """When its backward starts."""
        dropped_bytes = sum(size_bytes for ref, size_bytes in noted.items() if ref.expired())
        self._looks = self._looks + 1 if dropped_bytes > self._least_bytes else 0
        if self._looks == _LOOKS and self._looking:
            self._looking = False
            logger.warning(
                "what the model returned is let go of before each backward, but the plan counts "
                'its %s as held: with outputs="dropped" the same budget recomputes less',
                format_bytes(dropped_bytes),
            )
