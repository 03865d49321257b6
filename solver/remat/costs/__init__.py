"""Estimates of the time and memory of operations, without running them and without torch.

- `devices`: peak rates of known devices, from their data sheets.
- `flops`: floating point operations of ATen operations.
- `roofline`: the time of an operation on a device, from its FLOPs and memory traffic.
- `workspaces`: the memory that an operation allocates and frees while it runs on CUDA.
- `trace_costs`: stores measured or estimated costs in a trace.
- `scaling`: converts measured costs to other tensor sizes.
"""
