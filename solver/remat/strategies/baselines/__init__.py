"""Published algorithms to compare with: one strategy per module, except for those that others
share.

- `keep_all`, `recompute_all`: no recomputation, and as much as possible.
- `per_block`, `every_k`: checkpoints per block, as training scripts place them.
- `chen_sqrt`, `chen_greedy`, `articulation`: segments by Chen et al., and Checkmate's variants.
- `knapsack`, `selective`: which values to save, by a knapsack or by a program.
- `chains`: Revolve and Rotor, for chains of stages.
- `published_milp`: Checkmate's program, and rounding of its relaxation.
- `schedule_builder`, `module_blocks`: shared by the others.
"""
