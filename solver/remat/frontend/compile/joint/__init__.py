"""The joint forward and backward graph of a compiled step.

- `build`: builds the joint graph from AOTAutograd's
- `joint_graph`: the joint graph, with the kernels that torch.compile would run for it
- `probe_result`: a compiler's report about the kernels of one half
- `fx_utils`: properties of single FX nodes (bytes, storage base, operation or view, recomputable)
- `symbolic_sizes`: upper bounds of symbolic sizes
"""
