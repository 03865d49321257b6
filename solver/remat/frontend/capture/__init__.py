"""A training step as a `Trace`, without running it. `trace` is the entrance.

`flat` makes the model a function of tensors, `as_eager` holds torch's capture to what eager mode
runs (`attention`, `casts`, `dropout`, `cuda_kernels`, `cuda_autocast`), `joint` reads the graph
that comes out, with the help of `reader`, `draft`, `fakes`, `gradients` and `mutations`.
"""
