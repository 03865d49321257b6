"""The solvers that run a program: HiGHS through its own package, others through PuLP 3.3 or 4.

- `highs`: HiGHS; `outcome`: the answer of any solver.
- `program_arrays`: programs as arrays, written without PuLP.
- `pulp_solvers`: the solvers that PuLP supports; `pulp_versions`: PuLP 3.3 and 4 compared.
- `solver_processes`: interrupting the commands that PuLP starts.
- `availability`: which solvers work on this machine; `probe`: the script that tries them.
"""
