"""Tables of what the software GPU shows about remat: memory, code and numbers of CUDA.

- `families`: small models of real architectures.
- `eager_memory`: requested and allocated bytes of eager plans against their predictions.
- `compiled_memory`: the same under torch.compile.
- `absent_gpu`: traces for an absent GPU against traces on it.
- `numbers`, `compiled_numbers`: loss and gradients of plans against eager mode and Inductor.
- `code`: Inductor's kernels compiled for several architectures.
- `faults`: planted faults, and what notices them.
- `marked_tests`: the tests marked gpu.
- `tables`: the tables, with their cases and requirements.
- `runner`, `child`: run the cases, each in a process of its own.
"""
