"""A GPU in software: memory, code and numbers of CUDA on a machine without a GPU.

- `runtime`: the CUDA runtime, driver and cuBLAS without a device, in C.
- `build`: builds that library.
- `environment`: the environment variables of a process that uses it.
- `numbers`: right results for CUDA tensors, from the CPU's kernels.
- `codegen`: Inductor's kernels for GPUs, compiled without a device.
- `record_workspaces`: records what operators allocate while they run; `workspaces` has the calls.
"""
