"""Inductor's kernels for GPUs, planned by remat and compiled without a device.

torch's CPU build and the triton wheel suffice: the wheel contains the compiler ptxas. A model is
traced on the CPU, its joint graph moves to fake CUDA tensors, `backend="remat"` plans it and
Inductor generates the kernels of both halves; then Triton compiles each of them to machine code.

- `child`: does all of it in a process of its own; the only module that other code needs.
- `results`: data: requests, kernels, failures.
- `gpus`: the properties of an A100, an H100 and a B200.
- `cuda_stubs`: the functions of torch and Triton that report a GPU.
- `fake_cuda`: a traced graph on fake CUDA tensors.
- `planning`: plans a model for a GPU and collects its kernels.
- `compiling`: compiles kernels.
"""
