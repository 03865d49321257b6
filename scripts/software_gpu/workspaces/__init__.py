"""Calls of operators whose workspaces are recorded, at the sizes of training steps.

The operations of small models have small sizes. These calls add sizes at which kernels take other
paths: thousands of tokens, vocabularies of 32,000, hidden sizes of 4,096, and other layouts.

- `case`: one call of an operator.
- `reductions`, `attention`, `norms`, `losses`, `matmuls`, `indexing`, `sorting`, `images`,
  `pointwise`: the calls, by kind of operator.
- `calls`: a call on tensors of the device, and as JSON.
"""
