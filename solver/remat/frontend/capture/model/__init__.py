"""The model during a capture: how it is called, and what must not change around it.

flat_model         `FlatModel`: the model as a function from tensors to tensors
environment        training flags, autocast modes and versions that a capture assumes
preserved_state    parameters, buffers, attributes and RNG states, restored after a capture
hooks              hooks of modules: which ones a plan includes, and a warning for the others
module_paths       the path of the module that each operation belongs to
stored_values      the values that modules store between calls
call_limit         an error for a forward of too many operations
checkpointing      `torch.utils.checkpoint` disabled, so that remat decides on recomputation
compiled_modules   modules that torch.compile has wrapped: their original code is captured
meta_device        fake tensors in place of parameters that are on another device
"""
