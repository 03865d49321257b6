"""Workspaces: memory that operations allocate and free while they run on CUDA, by formulas.

The formulas follow torch's kernels, from shapes, strides and the device's data sheet, without
torch. They are exact for torch's own kernels, except for a few bounds that are slightly larger.
Checked against a recording of torch's allocations (`scripts/software_gpu/record_workspaces.py`).
cuDNN's workspaces are known to cuDNN only and not part of it.

- `formulas`: `operation_workspace`, the workspace of one operation.
- `attention`: flash attention and memory-efficient attention.
- `norms`: layer, group and batch norm, softmax.
- `losses`: losses, and scalars with the storage of their element-wise loss.
- `indexing`: lookups by indices, and the gradients of embeddings.
- `sorting`: sorts, scans and selections by CUB.
- `copies`: copies of operands in matrix products, pooling and resizing.
- `reductions`: sums, means, extrema, norms, variances.
- `reduce_kernel`: the launch of torch's reduction kernel and its buffers.
- `call`: one call of an operator, with the metadata of its tensors, and its allocations.
"""
