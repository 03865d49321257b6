"""Fusion groups of a compiled step: the kernels that Inductor makes, as the solver plans them."""
