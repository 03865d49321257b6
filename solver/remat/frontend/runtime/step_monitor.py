"""Reports uses of a step whose memory differs from what the plan counts.

Outputs that the caller releases before the backward: a plan with `outputs="held"` spends memory on
them; `outputs="dropped"` would recompute less, and `outputs="loss"` still less. And a backward that
retains the autograd graph: the plan counts saved tensors as freed by the backward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.documents.program import Program
from remat.limits.units import format_bytes

logger = logging.getLogger("remat")

_CONSECUTIVE_BACKWARDS = 3
"""The number of consecutive backward passes after which a release is no coincidence."""

_MIN_PEAK_FRACTION = 0.01
"""The fraction of the plan's peak from which released bytes are worth a report."""


_reported: WeakSet[nn.Module] = WeakSet()
"""The models with a warning about released outputs, so that each has one for all lengths."""

_reported_graphs: WeakSet[type[nn.Module]] = WeakSet()
"""The classes of models with a warning about a retained graph: the blocks of a model have one."""


def _is_graph_retained() -> bool:
    """Return True in a backward with `retain_graph=True`. torch has no public function for this;
    its own AOTAutograd calls this one."""
    is_retained = getattr(
        getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
    )
    return is_retained is not None and bool(is_retained())


class StepMonitor:
    """Checks at each backward whether the plan counts the memory of this use of the step.

    Warns of released outputs once for a model, after several backward passes in a row, and only if
    the plan recomputes anything. Warns of a retained graph once for a class of models.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._model = model
        has_recomputation = any(statement.recomputation for statement in program.backward)
        self._is_active = has_recomputation and not program.outputs_dropped
        self._unsaved_outputs = [
            index
            for index, o in enumerate(program.outputs)
            if o.name not in program.saved and not o.is_stored
        ]
        self._min_bytes = program.predicted_peak_bytes * _MIN_PEAK_FRACTION
        self._consecutive_releases = 0

    def weak_refs(self, outputs: Sequence[torch.Tensor]) -> dict[StorageWeakRef, int]:
        """Return weak references to the outputs that only the caller holds, with their bytes."""
        if not self._is_active:
            return {}
        storages = [outputs[index].untyped_storage() for index in self._unsaved_outputs]
        return {StorageWeakRef(storage): storage.nbytes() for storage in storages}

    def check_graph(self, saved: Sequence[torch.Tensor]) -> None:
        """Warn if the backward that starts retains its graph, and with it the saved tensors, which
        include no inputs."""
        if not _is_graph_retained() or type(self._model) in _reported_graphs:
            return
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in saved
            if t is not None
        }
        saved_bytes = sum(storages.values())
        if saved_bytes > self._min_bytes:
            _reported_graphs.add(type(self._model))
            logger.warning(
                "a backward of this %s has retain_graph=True: its saved tensors, %s, stay in "
                "memory, which the plan counts as freed, so the step may exceed the budget. Add "
                "the losses and call backward once, or lower the budget",
                type(self._model).__name__,
                format_bytes(saved_bytes),
            )

    def check_released(self, refs: dict[StorageWeakRef, int]) -> None:
        """Count the outputs that are freed when the backward starts, and warn if they often are."""
        released_bytes = sum(size_bytes for ref, size_bytes in refs.items() if ref.expired())
        if released_bytes > self._min_bytes:
            self._consecutive_releases += 1
        else:
            self._consecutive_releases = 0
        if self._consecutive_releases == _CONSECUTIVE_BACKWARDS and self._is_active:
            self._is_active = False
            if self._model in _reported:
                return
            _reported.add(self._model)
            logger.warning(
                "the model's outputs are released before each backward, but the plan counts their "
                '%s as held: pass outputs="dropped" to recompute less within the same budget, or '
                'outputs="loss" for a step that does not return them at all',
                format_bytes(released_bytes),
            )
