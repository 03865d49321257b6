"""Integrations with training libraries: one module for each library. Nothing in remat imports them.

- `accelerate`: a plugin for Accelerate's torch.compile.
- `checkpoint`: policies run by `torch.utils.checkpoint`.
- `lightning`: a callback for Lightning's `Trainer`.
- `megatron`: policies as options of Megatron-core.
- `torch_remat`: policies run by torch_remat.
- `torchtitan`: a memory policy for torchtitan's graph trainer.
- `transformers`: a callback for the `Trainer` of Transformers, and policies for its models.
"""
