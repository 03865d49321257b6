"""Planning a model block by block, for models that cannot be captured as a whole, or are sharded.

- `planner`: `ScopedPlanner`, which plans a model as a whole or by blocks.
- `block_planning`: the candidates of each block call, and the choice among them.
- `selection`: the submodules that are planned.
- `discovery`: the repeated blocks of a model.
- `dry_run`: one step with stubbed blocks: when blocks run, and what others allocate.
- `stub`: the autograd node that stands for a block in the dry run.
- `profile`: time and memory of blocks that run in eager mode.
- `block_options`: capture and solving of blocks.
- `candidates`: the options of each block call, with the inputs that they save.
- `runtime`: the step with planned blocks.
- `module_state`: snapshots of buffers, attributes and RNG states.
- `patching`: forwards replaced for one step.
- `fsdp2`: models whose parameters FSDP2 has sharded.
"""
