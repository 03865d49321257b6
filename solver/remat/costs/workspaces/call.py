"""`OperatorCall`: one call of an operator on a CUDA device, and the memory that it allocates.

A formula lists the allocations of a call in their order, as bytes: positive when memory is
allocated, negative when it is freed. Results are never freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from remat.costs.devices import DeviceSpec
from remat.costs.layouts import is_contiguous, span_bytes, tensor_bytes
from remat.documents.arguments import Argument, Ref
from remat.documents.records import Node, Result, TensorMeta

ALIGNMENT_BYTES = 512
"""torch's CUDA caching allocator rounds every request up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator on a CUDA device: `args` and `kwargs` contain the metadata of
    tensors, `results` the tensors that it returns."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    results: tuple[Result, ...]
    device: DeviceSpec

    def tensor(self, index: int) -> TensorMeta:
        """Return the tensor at a position. Raises TypeError if another argument is there."""
        argument = self.optional_tensor(index)
        if argument is None:
            raise TypeError(f"argument {index} is no tensor")
        return argument

    def optional_tensor(self, index: int) -> TensorMeta | None:
        """Return the tensor at a position; None if another argument is there, or none."""
        argument = self.argument(index)
        return argument if isinstance(argument, TensorMeta) else None

    def argument(self, index: int, default: object = None) -> object:
        """Return the positional argument at a position, or `default` if there are fewer."""
        return self.args[index] if index < len(self.args) else default

    def integer(self, index: int, default: int = 0) -> int:
        """Return the integer at a position. Raises TypeError if another argument is there."""
        argument = self.argument(index, default)
        if not isinstance(argument, int):
            raise TypeError(f"argument {index} is no integer: {argument!r}")
        return argument

    @property
    def is_empty(self) -> bool:
        """True if the first operand has no elements: such calls allocate next to nothing."""
        first = self.optional_tensor(0)
        return first is not None and 0 in first.shape

    @property
    def result_bytes(self) -> list[int]:
        """The bytes of the storages of its results, in order."""
        storages: dict[int, int] = {}
        for result in self.results:
            span = span_bytes(result.tensor)
            storages[result.storage] = max(storages.get(result.storage, 0), span)
        return list(storages.values())


Allocations: TypeAlias = Iterable[int]
"""Bytes that a call allocates (positive) and frees (negative), in order."""

Formula: TypeAlias = Callable[[OperatorCall], Allocations]
"""A function that lists the allocations of a call."""


StorageFormula: TypeAlias = Callable[[OperatorCall], tuple[int, ...]]
"""A function that returns the bytes of the storages of a call's results, by position: 0 for those
that are no larger than their tensors."""


def operator_call(node: Node, metas: Mapping[str, TensorMeta], device: DeviceSpec) -> OperatorCall:
    """Return the call that an operation of a trace makes. `metas` has the tensors that it reads."""

    def with_metas(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return metas[argument.name]
        if isinstance(argument, tuple):
            return tuple(with_metas(item) for item in argument)
        return argument

    return OperatorCall(
        tuple(with_metas(item) for item in node.args),
        {key: with_metas(value) for key, value in node.kwargs.items()},
        node.results,
        device,
    )


def peak_workspace_bytes(allocations: Allocations) -> int:
    """Return the peak of the bytes that a call allocates, less the bytes that remain afterwards,
    such as results."""
    current_bytes = peak_bytes = 0
    for size_bytes in allocations:
        current_bytes += _allocator_bytes(size_bytes)
        peak_bytes = max(peak_bytes, current_bytes)
    return peak_bytes - current_bytes


def buffers_at_peak(allocations: Allocations) -> list[int]:
    """Return the temporary buffers that are live at the peak of a call, in order, as bytes that the
    allocator counts."""
    live: list[int] = []
    at_peak: list[int] = []
    for size_bytes in map(_allocator_bytes, allocations):
        if size_bytes > 0:
            live.append(size_bytes)
        elif size_bytes:
            live.remove(-size_bytes)
        if sum(live) > sum(at_peak):
            at_peak = [*live]
    for size_bytes in live:  # results
        if size_bytes in at_peak:
            at_peak.remove(size_bytes)
    return at_peak


def _allocator_bytes(size_bytes: int) -> int:
    """Return the bytes that the allocator counts for an allocation, or a free if negative."""
    rounded_bytes = -(-abs(size_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return rounded_bytes if size_bytes > 0 else -rounded_bytes


def contiguous_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy that `contiguous()` makes: 0 if the tensor is contiguous."""
    return 0 if is_contiguous(meta) else tensor_bytes(meta)


def buffers_during(buffers: Iterable[int], allocations: Allocations = ()) -> Allocations:
    """Yield the allocation of temporary buffers, then `allocations`, then the release of the
    buffers. Buffers of 0 bytes are left out."""
    sizes = [size for size in buffers if size]
    yield from sizes
    yield from allocations
    yield from (-size for size in sizes)


def results_and_buffers(buffers: Callable[[OperatorCall], Iterable[int]]) -> Formula:
    """Return the formula of an operator that allocates its results, then these buffers, which are
    live at the same time and freed at the end."""

    def formula(call: OperatorCall) -> Allocations:
        yield from call.result_bytes
        yield from buffers_during(buffers(call))

    return formula
