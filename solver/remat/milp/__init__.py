"""The mixed-integer program: slots, model, cuts, and the solvers that run it."""
