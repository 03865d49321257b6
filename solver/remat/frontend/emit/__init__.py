"""Checkpointing policies for executors other than remat, under the rules of each.

- `emit`: `remat.emit`, which selects a policy for each block.
- `trials`: the executors by the name of their rules; each block, run under each of their policies.
- `operators`: `torch.utils.checkpoint` with a decision for each operator call.
- `regions`: torch_remat, which saves what selected submodules save.
- `megatron`: Megatron-core's recomputation settings.
- `operator_profile`: the operator calls of a block's forward, with their times and bytes.
- `apply_policies`: policies applied to a model by replacing its blocks' forwards.
- `transformers_layers`: Transformers' layers that have gradient checkpointing built in.
- `tags`: MUST_SAVE and MUST_RECOMPUTE tags on a training step in one fx graph.
"""
