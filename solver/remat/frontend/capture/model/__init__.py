"""The model during a capture: how it is called, and what must not change around it.

flat_model         `FlatModel`: the model as a function from tensors to tensors
environment        training flags, autocast modes and versions that a capture assumes
preserved_state    parameters, buffers, attributes and RNG states, restored after a capture
hooks              hooks of modules: which ones a plan includes, and a warning for the others
checkpointing      `torch.utils.checkpoint` disabled, so that remat decides on recomputation
compiled_modules   modules that torch.compile has wrapped: their original code is captured
meta_device        fake tensors in place of parameters that are on another device
"""
