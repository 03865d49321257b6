"""The solvers that run a program: HiGHS through its own package, others through PuLP 3.3 or 4.

- `program`: a program as columns, rows and arrays, and the answer of any solver.
- `highs`: HiGHS; `pulp_solvers`: the solvers that PuLP supports, in version 3.3 or 4.
- `solver_processes`: interrupting the commands that PuLP starts.
- `availability`: which solvers work on this machine; `probe`: the script that tries them.
"""
