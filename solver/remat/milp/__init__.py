"""The mixed-integer program whose solution is a schedule, its relaxations, and the solvers.

- `slots`: where operations may run; `model`: the program over slots.
- `backends`, `solvers`: running a program on HiGHS or on a solver that PuLP knows.
- `checkpoint_cuts`, `retention_advice`: the relaxation at a few cuts, its bound and its advice.
- `identical_blocks`: repeated layers, and one decision for several of them.
"""
