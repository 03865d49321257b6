"""The mixed-integer program whose solution is a schedule, its relaxations, and the solvers.

- `slots`: where operations may run; `model`, `builder`: the program over slots.
- `backends`, `solvers`: running a program on HiGHS or on a solver that PuLP knows.
- `warm_start`: a schedule as a solution to start from.
- `checkpoint_cuts`, `retention_advice`: the relaxation at a few cuts, its bound and its advice.
- `relaxation_support`: what the relaxation over slots uses and retains.
- `identical_blocks`, `shared_decisions`: repeated layers, and one decision for several of them.
- `small_values`: values that are always retained, so that no program decides on them.
"""
