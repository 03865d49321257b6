"""Workspaces: memory that operations allocate and free while they run on CUDA, by formulas.

The formulas follow torch's kernels, from shapes, strides and the device's data sheet, without
torch. They are exact for torch's own kernels, except for a few bounds that are slightly larger.
Checked against a recording of torch's allocations (`scripts/software_gpu/record_workspaces.py`).
cuDNN's workspaces are known to cuDNN only and not part of it.
"""
