"""Names of operations with a meaning of their own in documents: remat's, and the boundary."""

from __future__ import annotations

BOUNDARY_NAME = "backward_start"
"""Name of the pseudo operation that starts the backward pass and produces the tangents."""

COPY_TARGET = "aten.copy_.default"
"""The operation that writes a new value into a mutated buffer or input: the only one of
ATen that may write into a tensor of the caller."""

ACCUMULATE_TARGET = "remat.accumulate.default"
"""The operation that adds a gradient into an existing `.grad`, and frees the gradient."""

PREVIOUS_OUTPUTS_TARGET = "remat.previous_outputs.default"
"""Stands for the outputs of the step before, which exist already: only predictions have it."""

FREE_PREVIOUS_OUTPUTS_TARGET = "remat.free_previous_outputs.default"
"""Stands for the assignment of new outputs to the variables of the previous ones."""

ADD_INTO_TARGET = "remat.add_into.default"
"""The operation that adds the second gradient of a tied parameter into the first, in place."""

ADD_TARGET = "remat.add.default"
"""Adds a tensor to a sum, in place, and returns the sum."""

ADD_PRODUCT_TARGET = "remat.add_product.default"
"""Adds a product of two matrices to a sum, in place, and returns the sum."""

WRITE_ROWS_TARGET = "remat.write_rows.default"
"""Writes some rows into a buffer, in place, and returns it. Without a buffer, allocates one."""

WRITE_TARGET = "remat.write.default"
"""Calls an operator that writes into a view of a tensor, and returns the whole tensor. See
`remat.documents.writes`."""

OFFLOAD_TARGET = "remat.offload.default"
"""Starts the copy of a tensor to the host, and returns a handle: an int64 tensor of one element."""

RELEASE_TARGET = "remat.release.default"
"""Waits until a copy to the host has ended, so that the tensor, its second argument, may be freed.
Returns a handle of the copy."""

RELOAD_TARGET = "remat.reload.default"
"""Allocates a tensor, and starts the copy from the host into it. Its argument is a handle."""

ARRIVE_TARGET = "remat.arrive.default"
"""Waits until a copy from the host has ended, and returns the tensor that it filled."""

OFFLOAD_TARGETS = frozenset({OFFLOAD_TARGET, RELEASE_TARGET, RELOAD_TARGET, ARRIVE_TARGET})
"""Operations that move tensors between device and host while other operations run."""

OVERWRITING_TARGETS = frozenset({ADD_TARGET, ADD_PRODUCT_TARGET, WRITE_ROWS_TARGET, ARRIVE_TARGET})
"""Operations that write their result over their first argument, which nothing reads later. In a
trace the result has a storage of its own, like that of any other operation."""
