"""Right results for CUDA tensors on the software GPU, from the CPU's kernels.

The memory of the software GPU is memory of the host. Each ATen operation on CUDA tensors is first
computed by the CPU's kernel on CPU tensors over the same memory. Then torch's own CUDA kernel runs,
for its checks, allocations and random offsets; it computes nothing. The results of the first are
written into the outputs of the second. The replacement is registered below autograd and all modes,
so it applies to every thread, to the backward, and where modes are disabled.

- `switch`: turn the replacement on and off; child processes and threads.
- `replacement`: one operation: CPU first, then CUDA, then the results.
- `operators`: the operations that are replaced, and what their schemas say.
- `host_memory`: CPU tensors over the memory of CUDA tensors.
- `random_numbers`: CPU generators seeded from the seed and offset of a CUDA generator.
- `counterparts`: CPU versions of operations that differ on CUDA or exist only there; with
  `attention`, `recurrent`, `precision` and `allocations`.
- `cuda_graphs`: recorded operations, recomputed when a CUDA graph is replayed.
- `libdevice`: the functions of NVIDIA's libdevice for Triton's interpreter.
- `interpreter`: Triton's interpreter on the memory of the software GPU.
"""

from __future__ import annotations

from scripts.software_gpu.numbers.switch import disable, enable, is_enabled, right_numbers

__all__ = ["disable", "enable", "is_enabled", "right_numbers"]
