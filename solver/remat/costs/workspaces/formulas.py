"""`operation_workspace`: the memory that an operation allocates and frees while it runs on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat.costs.devices import DeviceSpec
from remat.costs.workspaces import attention, indexing, layers, reductions
from remat.costs.workspaces.call import (
    Formula,
    StorageFormula,
    buffers_at_peak,
    operator_call,
    peak_workspace_bytes,
)
from remat.documents.records import Node, TensorMeta
from remat.documents.writes import call_of_write
from remat.errors import DocumentError

FORMULAS: dict[str, Formula] = {
    **reductions.FORMULAS,
    **attention.FORMULAS,
    **layers.FORMULAS,
    **indexing.FORMULAS,
}
"""Formulas by operator. Operators without one allocate nothing but their results."""

STORAGES: dict[str, StorageFormula] = {**attention.STORAGES, **layers.STORAGES}
"""Storages by operator, for those whose results have larger storages than fake tensors have."""


@dataclass(frozen=True, slots=True)
class OperationWorkspace:
    """The memory of an operation besides the tensors that it returns: `size_bytes` are allocated
    only while it runs. `storage_bytes` are the storages of its results by position, 0 for those
    that are no larger than the result."""

    size_bytes: int
    storage_bytes: tuple[int, ...] = ()


def workspace_buffers(node: Node, metas: Mapping[str, TensorMeta], device: DeviceSpec) -> list[int]:
    """Return the bytes of the buffers that a node's `workspace_bytes` consist of, in order: the
    buffers of the operator's formula, if they have as many bytes; else one buffer; [] for no
    workspace."""
    if not node.workspace_bytes:
        return []
    if formula := FORMULAS.get(node.target):
        try:
            buffers = buffers_at_peak(formula(operator_call(node, metas, device)))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            buffers = []  # the workspace is not by the formula
        if sum(buffers) == node.workspace_bytes:
            return buffers
    return [node.workspace_bytes]


def operation_workspace(
    node: Node, metas: Mapping[str, TensorMeta], device: DeviceSpec
) -> OperationWorkspace:
    """Return the workspace of an operation on a CUDA device: 0 bytes without a formula. `metas` has
    the tensors that it reads. Raises `DocumentError` for invalid arguments."""
    node, metas = call_of_write(node, metas)
    formula, storage = FORMULAS.get(node.target), STORAGES.get(node.target)
    if node.view or (formula is None and storage is None):
        return OperationWorkspace(0)
    try:
        call = operator_call(node, metas, device)
        if call.is_empty:
            return OperationWorkspace(0)
        return OperationWorkspace(
            peak_workspace_bytes(formula(call)) if formula else 0, storage(call) if storage else ()
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DocumentError(
            f"operation {node.name} has other arguments than {node.target} takes ({error})"
        ) from None
