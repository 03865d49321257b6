"""The solvers that run a program: HiGHS by its own package, others by PuLP, of any version."""
