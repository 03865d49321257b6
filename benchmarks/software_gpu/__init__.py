"""Tables of what the software GPU shows about remat: memory, code and numbers of CUDA.

- `families`: small models of real architectures.
- `eager_memory`: requested and allocated bytes of eager plans against their predictions.
- `compiled_memory`: the same under torch.compile.
- `absent_gpu`: traces for an absent GPU against traces on it.
- `numbers`: loss and gradients of plans against eager mode.
- `code`: Inductor's kernels compiled for several architectures.
- `faults`: planted faults, and what notices them.
- `tables`: the tables, with their cases and requirements.
- `child`: runs one case in a process of its own.
"""
