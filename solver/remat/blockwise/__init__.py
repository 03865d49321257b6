"""Planning a training step block by block, against one budget for the whole step. No torch here.

- `block_step`: the step as its blocks see it: options of each block, events, peak and time.
- `pareto_options`: the options of one block, solved for a range of memory limits.
- `choose`: the cheapest options of all blocks that fit the budget together, with saved tensors
  that are offloaded to the host.
- `selective_checkpointing`: which outputs a selectively checkpointed block saves.
- `blocks_plan`: `BlocksPlan`, the result that users see.
- `policies`: `Policies`, the result for other checkpointing libraries.
"""
