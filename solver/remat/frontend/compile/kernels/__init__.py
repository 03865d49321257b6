"""Fusion groups of a compiled step: the kernels that Inductor makes, as the solver plans them.

- `fusion_groups`: `FusionGroup`, and how the joint graph is divided into groups.
- `cpu_costs`: per-element work of CPU kernels that vector instructions do not speed up.
- `inline_producers`: producers that the kernels reading them recompute instead of reading.
- `fused_recompute`: saved tensors that backward kernels recompute next to their own outputs.
- `separate_reductions`: reductions as groups of their own, so that their inputs are freed early.
- `execution_order`: the order of groups that are not Inductor's kernels.
- `in_place`: inputs whose memory a backward operation may write its outputs into.
- `cost_model`: seconds and workspace bytes of each group.
- `variants`: the alternative groupings of a step, and which of their plans is preferred.
- `to_solver`: fusion groups to the solver's graph.
- `to_fx`: a schedule to the forward and backward fx graphs that run it.
- `plain_step`: the forward and backward graphs of plain torch.compile, to verify their peak.
"""
