"""The operations that put the pieces of a split operation together, in place.

A trace in which something reads the overwritten tensor later is invalid (see
`remat.documents.trace.OVERWRITING_TARGETS`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.documents.targets import ADD_PRODUCT_TARGET, ADD_TARGET, WRITE_ROWS_TARGET
from remat.frontend.common.operators import register


def add(total: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Add a summand of the same shape to a sum, in place, and return the sum."""
    return total.add_(summand)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the product of two matrices to a sum, in place, and return the sum."""
    return total.addmm_(left, right)


def write_rows(
    buffer: torch.Tensor | None,
    rows: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    first: int,
    count: int,
    start: int,
) -> torch.Tensor:
    """Write rows into a buffer of this shape and stride from row `start` on, in place, and return
    it. The rows are `count` dimensions of the buffer from `first` on, as one dimension."""
    if buffer is None:
        buffer = rows.new_empty_strided(shape, stride)
    last = first + count - 1
    flat = buffer.view(*shape[:first], -1, *shape[last + 1 :])  # raises if that would be a copy
    part = rows.flatten(first, last) if count > 1 else rows
    flat.narrow(first, start, part.shape[first]).copy_(part)
    return buffer


register(ADD_TARGET, add)
register(ADD_PRODUCT_TARGET, add_product)
register(WRITE_ROWS_TARGET, write_rows)
