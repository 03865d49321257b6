"""Scalars that a kernel returns in the storage of its operand's elements: torch's mean squared
error."""

from __future__ import annotations

from math import prod

from remat.passes.split.regions import Region
from remat.passes.split.states import PartialSum

_MAX_SCALAR_BYTES = 8
"""The bytes of a scalar in the largest dtype that gradients are computed in."""


def bytes_of_large_scalars(region: Region) -> dict[int, int]:
    """Return the bytes of each scalar that the region adds up and whose storage has an element for
    each of the operand's, by storage. The sum over the pieces needs only as many."""
    trace, scalars = region.trace, dict[int, int]()
    for index, split in region.split_calls.items():
        node = trace.nodes[index]
        for result, state in zip(node.results, split.results, strict=True):
            size_bytes = trace.storage_bytes[result.storage]
            is_scalar = isinstance(state, PartialSum) and not result.tensor.shape
            if is_scalar and size_bytes > _MAX_SCALAR_BYTES:
                elements = prod(trace.tensors[node.operand_names[0]].shape)
                scalars[result.storage] = size_bytes // elements
    return scalars
