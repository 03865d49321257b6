"""The model during a capture: how it is called, and what must not change around it.

flat_model         `FlatModel`: the model as a function from tensors to tensors
preserved_state    parameters, buffers and RNG states, replaced and restored after a capture
hooks              hooks of modules: which ones a plan includes, and a warning for the others
module_paths       the path of the module that each operation belongs to
stored_values      the values that modules store between calls
forward_checks     what a forward must not do: too many operations, other random numbers, prints
wrapped_code       checkpoints and compiled code in the model, whose code is captured
"""
